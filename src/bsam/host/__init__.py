"""The machine under a program: worker processes and a line of progress."""
