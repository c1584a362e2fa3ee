"""Ways to show what happened: text first, so that every picture has one."""
