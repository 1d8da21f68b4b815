"""What a notebook needs to teach: figures, interactives, exercises, facts, source display."""
