"""One node: its configuration, its users and what they may do, and the page that shows how it is.

A question and its file: "where does this setting come from?" `config.py`. "Who may log in?" `users.py`. "May this user
write to that exchange?" `permissions.py`. "What does the web page show?" `status_page.py`.
"""
