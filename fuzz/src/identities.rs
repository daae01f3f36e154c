//! Certificates: from the network, and in files.

use harvestfs_protocol::identity::{
    CA_CERT_FILE, CERT_FILE, CertificateAuthority, Identity, KEY_FILE, Peer,
};
use rustls_pki_types::CertificateDer;

use crate::{parts, put, scratch};

/// The first byte decides whether the rest is a certificate or a name from one.
pub fn peer_names(input: &[u8]) {
    let Some((kind, rest)) = input.split_first() else {
        return;
    };
    let peer = if kind % 2 == 0 {
        Peer::from_certificate(&CertificateDer::from(rest))
    } else {
        match std::str::from_utf8(rest) {
            Ok(name) => Peer::from_dns_name(name),
            Err(_) => return,
        }
    };
    if let Ok(peer) = peer {
        assert_eq!(Peer::from_dns_name(&peer.dns_name()).ok(), Some(peer));
    }
}

/// Three parts: the content of `ca.pem`, `cert.pem` and `key.pem`. They are also used as the files of an authority.
pub fn identity_files(input: &[u8]) {
    let [authority, certificate, key] = parts(input);
    let directory = scratch();
    put(&directory.join(CA_CERT_FILE), authority);
    put(&directory.join(CERT_FILE), certificate);
    put(&directory.join(KEY_FILE), key);
    let _ = Identity::load(&directory);
    put(
        &directory.join(harvestfs_protocol::identity::CA_KEY_FILE),
        key,
    );
    let _ = CertificateAuthority::load(&directory);
}
