"""Fine-tuning with Muon and with AdamW: `python -m benchmarks.finetune`."""
