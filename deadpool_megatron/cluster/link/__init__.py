"""The lines between a member, its agent and the coordinator, both ends.

agent_link    the agent's end: greetings, reports that are never lost
peers         the coordinator's end: all agents, and who asks from outside
protocol      messages of agents and members as inputs of the machine
pacing        how often, and how much is kept
member_link   a training process's line to its agent, and the pause that is ordered on it
rendezvous    the store in which communicators meet, at all three places
"""
