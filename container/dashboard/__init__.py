"""The page at /dashboard: what the server does, as it does it, for people.

history   the last minutes, a sample a second, and the last events, on the event loop
document  what the page shows, as plain data, from the engine's state, on the event loop
routes    the frame of the page, its data as JSON, its files. A Flask blueprint

`templates/dashboard.html` is a frame without data. `static/dashboard.js` asks for the data once a second and draws
them; `static/draw.js` has the shapes and words. What a client can name (models, errors) becomes text, never markup.
"""
