"""``python -m whitney_loop close SESSION_ID``: cancel what runs in a session, and close it."""

from __future__ import annotations

import argparse
import sys

from whitney_loop.client import WhitneyClient, is_id
from whitney_loop.errors import WhitneyError, redacted
from whitney_loop.lifecycle import close_everything


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m whitney_loop", description="Clean up on a Whitney service.")
    close = parser.add_subparsers(dest="command", required=True).add_parser(
        "close", help="cancel what runs in a session, wait for it to end, and close the session"
    )
    close.add_argument("session_id", metavar="SESSION_ID")
    close.add_argument("--base-url", help="default: WHITNEY_BASE_URL; the key always comes from WHITNEY_API_KEY")
    close.add_argument("--ca-file", metavar="FILE", help="certificates (PEM) to trust in place of the system's")
    options = parser.parse_args(arguments)
    if not is_id(options.session_id):  # not shown: a terminal may not take it
        print("error: SESSION_ID is no id: copy it again from where it was printed", file=sys.stderr)
        return 2
    try:
        cancelled = close_everything(WhitneyClient(options.base_url, ca_file=options.ca_file), options.session_id)
    except WhitneyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(redacted(f"interrupted: session {options.session_id} may still be open"), file=sys.stderr)
        return 130
    for run_id in cancelled:
        print(redacted(f"cancelled run {run_id}"))
    print(redacted(f"closed session {options.session_id}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
