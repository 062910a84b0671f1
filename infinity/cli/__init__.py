"""Every word that the user reads: commands, options, live display, sentences for errors, exit codes."""
