"""The work of each command, by its name: imported once the command has read its words, as torch takes seconds."""
