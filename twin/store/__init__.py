"""The prefix tensor store on simulated time."""
