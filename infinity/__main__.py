"""`python -m infinity`: the same as the `infinity` command."""

from infinity.cli.entry import main

main()
