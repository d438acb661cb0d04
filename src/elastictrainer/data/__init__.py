"""Images and models through one door: folders, torchvision, timm, the built-in default."""
