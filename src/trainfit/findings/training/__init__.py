"""What spoils a training's learning: conditions over what a run showed, and each fix's words."""
