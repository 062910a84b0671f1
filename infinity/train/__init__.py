"""The main job: preflight, plan, the loop over steps, checkpoints, metrics and the summary. Words are the reporter's."""
