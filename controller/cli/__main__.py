"""``python -m trimtab.controller.cli``: the ``trimtab`` command where its script is not on the path."""

from trimtab.controller.cli.main import main

main()
