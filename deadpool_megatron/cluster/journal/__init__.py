"""Write-once decisions, and terms of coordinators."""
