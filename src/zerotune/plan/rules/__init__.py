"""The rules that check a plan, each with an id, a severity and a fix."""
