"""One role that is seated here: its worker, its restore, the dialogue with its member."""
