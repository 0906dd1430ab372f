"""The page at /dashboard: what the server does, as it does it, for people.

history   the last minutes, a sample a second. PURE
watcher   takes the samples and keeps the last events, on the event loop
document  what the page shows, as plain data, from the engine's state, on the event loop
drawing   the shapes of bars and charts, and numbers for people. PURE
routes    the page, its data, its two files. A Flask blueprint

`templates/dashboard.html` is the page as the server writes it, complete without JavaScript; `static/dashboard.js`
asks for it once a second and brings what is shown up to it. Whatever a client can name (models, errors) goes through
the template's escaping.
"""
