"""Logins with an OpenID Connect provider: authorization code with PKCE, groups to roles."""
