//! D2TP's cryptography: Noise IK handshake, packet protection, replay window, cookies.
