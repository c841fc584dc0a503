"""Analysis of captured graphs: attentions, masks, positions, latents, and the dependencies of nodes."""
