"""What the kernel keeps of a run: state, files on disk, verdict; and who tells its agents what."""
