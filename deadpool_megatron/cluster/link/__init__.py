"""The connections between a member, its agent and the coordinator, both ends.

agent_link      the agent's end: greetings, and reports that are never lost
peers           the coordinator's end: all agents, and commands of users
protocol        messages of agents and members as inputs of the machine
message_limits  message rates, and limits on unacknowledged messages
member_link     a training process's link to its agent, and the pause that is ordered on it
rendezvous      the store in which communicators meet, in all three processes
"""
