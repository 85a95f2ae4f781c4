"""An HTTP server for one model: the native protocol, those of OpenAI, llama.cpp and Mistral, and a
web page."""
