"""An HTTP server around one model: our own protocol, OpenAI's completions, llama.cpp's infill,
Mistral's FIM, and a page.
"""
