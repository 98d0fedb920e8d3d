"""`coexec db key`: one's own signing key, and whose signatures are believed."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

import click

from coexec.cli.output import print_entries, print_json, print_line, print_table
from coexec.cli.parameters import json_option

if TYPE_CHECKING:
    from coexec.subgraphs.trust import Keyring


@click.command()
@click.option("--create", is_flag=True, help="Make a signing key unless there is one.")
@click.option("--trust", "trusted_key", metavar="PUBLIC_KEY", help="From now on believe what this key signs.")
@click.option("--who", default="", metavar="NAME", help="A note on the owner, beside --trust.")
@json_option
def key(create: bool, trusted_key: str | None, who: str, as_json: bool) -> None:
    """Show your public key and the keys you trust; make or trust one.

    What others wrote into a shared store, or exported, is native code: it is loaded only with the signature of a key
    listed here. To end that trust, remove the key's line from the file `trusted_keys`.

    \b
    Examples:
      coexec db key --create
      coexec db key --trust 3q2+7w...= --who "build farm"
    """
    from coexec.subgraphs.trust import Keyring

    if who and trusted_key is None:
        raise click.UsageError("--who goes with --trust PUBLIC_KEY")
    keyring = Keyring()
    if create:
        keyring.create()
    if trusted_key is not None:
        keyring.trust(trusted_key, who)
    _print(keyring, as_json)


def _print(keyring: Keyring, as_json: bool) -> None:
    from coexec.subgraphs.trust import SIGNING_KEY

    own = keyring.public_key() if (keyring.folder / SIGNING_KEY).exists() else None
    trusted = {
        identity: base64.b64encode(public.public_bytes_raw()).decode() for identity, public in keyring.trusted().items()
    }
    if as_json:
        print_json({"folder": keyring.folder, "public_key": own, "trusted": trusted})
        return
    print_entries({"folder": keyring.folder, "your key": own or "none; `coexec db key --create` makes one"})
    if trusted:
        print_line()
        rows = [(identity[:16], public, "yours" if public == own else "") for identity, public in trusted.items()]
        print_table(("key id", "trusted public key", ""), rows)
