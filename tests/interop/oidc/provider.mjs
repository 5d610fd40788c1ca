// An OpenID Connect provider: `node provider.mjs SETTINGS`, with JSON as the argument.
// clients: as in oidc-provider's configuration. users: the claims of each login name, beside its subject. The password
// does not matter, and nobody is asked for consent. seed: keys of the same seed are the same.
import { createPrivateKey, createHash } from "node:crypto";
import { createServer } from "node:http";
import { Provider } from "oidc-provider";

const { port, clients, users, seed } = JSON.parse(process.argv[2]);

// An Ed25519 key is any 32 bytes, here in the DER of PKCS #8.
function signingKey() {
  const secret = createHash("sha256").update(seed).digest();
  const der = Buffer.concat([Buffer.from("302e020100300506032b657004220420", "hex"), secret]);
  const jwk = createPrivateKey({ key: der, format: "der", type: "pkcs8" }).export({ format: "jwk" });
  return { ...jwk, use: "sig", alg: "Ed25519", kid: createHash("sha256").update(jwk.x).digest("hex").slice(0, 8) };
}

const provider = new Provider(`http://127.0.0.1:${port}`, {
  clients: clients.map((client) => ({ id_token_signed_response_alg: "Ed25519", ...client })),
  jwks: { keys: [signingKey()] },
  claims: { openid: ["sub"], email: ["email", "email_verified"], profile: ["name"], groups: ["groups"] },
  scopes: ["openid", "profile", "email", "groups"],
  enabledJWA: { idTokenSigningAlgValues: ["Ed25519", "RS256"] },
  cookies: { keys: [seed] },
  pkce: { required: () => true },
  features: { devInteractions: { enabled: true }, rpInitiatedLogout: { enabled: true } },
  async findAccount(_, id) {
    return { accountId: id, claims: async () => ({ sub: id, ...users[id] }) };
  },
  async loadExistingGrant(context) {
    const { client, params, session } = context.oidc;
    const grant = new provider.Grant({ clientId: client.clientId, accountId: session.accountId });
    grant.addOIDCScope(params.scope);
    await grant.save();
    return grant;
  },
});
provider.on("server_error", (_, error) => console.error("server_error", error));

const server = createServer(provider.callback());
server.listen(port, "127.0.0.1", () => console.log("listening"));
process.on("SIGTERM", () => process.exit(0));
