"""Files, memory, processor, progress and the disk cache: what mionnx needs of the machine."""
