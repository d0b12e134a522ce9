"""What one step ran: operators with their FLOPs, phase, module and precision."""
