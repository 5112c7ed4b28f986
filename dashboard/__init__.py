"""What-if questions to the twin in a browser (Streamlit). Computes no number of its own."""
