"""What happens at a gateway, told to those who watch it; decides nothing."""
