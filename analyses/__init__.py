"""What is measured, and the laboratory of small trained models."""
