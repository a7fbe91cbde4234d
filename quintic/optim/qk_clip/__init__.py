"""QK-clip: bounded attention logits (MuonClip)."""
