"""`python -m infinity`: the same as the `infinity` command."""

from infinity.cli.main import main

main()
