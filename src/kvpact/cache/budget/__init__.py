"""A budget of bytes: which layer takes the next spec at which length."""
