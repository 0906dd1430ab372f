"""The page at /dashboard: what the server does, as it does it, for people.

`document` keeps the last minutes and says what the page shows, as plain data; `control.http` serves it.
`templates/dashboard.html` is a frame without data. `static/dashboard.js` asks for the data once a second and draws
them; `static/draw.js` has the shapes and words. What a client can name (models, errors) becomes text, never markup.
"""
