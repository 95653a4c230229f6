"""Attention over everything: what is launched, the general kernel, and the merge of parts."""
