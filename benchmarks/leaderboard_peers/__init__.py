"""One file a package: what the leaderboard measures of it, and what was changed to make it run."""
