"""python3 -m unittest discover -s tools/decoder: the decoder against the vectors and the RFCs."""

import json
import pathlib
import unittest

import decode
from d2tp import crypto, frames, handshake, mlkem, noise, packets, protection, reader, records

NO_CLAIMS = {"metered": False, "claims": []}
VECTORS = pathlib.Path(__file__).resolve().parents[2] / "docs" / "vectors"


def vectors(name):
    return json.loads((VECTORS / f"{name}.json").read_text())


def unhex(told):
    return bytes.fromhex(told.replace(" ", ""))


class Primitives(unittest.TestCase):
    def test_x25519_gives_what_rfc_7748_5_2_says(self):
        k = unhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
        u = unhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
        out = unhex("c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552")
        self.assertEqual(crypto.x25519(k, u), out)

    def test_aes_gives_what_fips_197_c_1_says(self):
        key = unhex("000102030405060708090a0b0c0d0e0f")
        out = crypto.Aes(key).block(unhex("00112233445566778899aabbccddeeff"))
        self.assertEqual(out, unhex("69c4e0d86a7b0430d8cdb78070b4c55a"))

    def test_hkdf_gives_what_rfc_5869_a_1_says(self):
        key = crypto.hkdf_extract(bytes(range(13)), b"\x0b" * 22)
        out = crypto.hkdf_expand(key, bytes(range(0xF0, 0xFA)), 42)
        self.assertEqual(out[:8], unhex("3cb25f25faacd57a"))
        self.assertEqual(out[-4:], unhex("34007208d5b887185865"[-8:]))

    def test_poly1305_gives_what_rfc_8439_2_5_2_says(self):
        key = unhex("85d6be7857556d337f4452fe42d506a80103808afb0db2fd4abff6af4149f51b")
        out = crypto.poly1305(key, b"Cryptographic Forum Research Group")
        self.assertEqual(out, unhex("a8061dc1305136c6c22b8baf0c0127a9"))

    def test_one_wrong_bit_is_a_forgery(self):
        sealed = crypto.chacha_seal(bytes(32), bytes(12), b"", b"abc")
        self.assertEqual(crypto.chacha_open(bytes(32), bytes(12), b"", sealed), b"abc")
        for i in range(8 * len(sealed)):
            bad = crypto.xor(sealed, (1 << i).to_bytes(len(sealed), "big"))
            with self.assertRaises(crypto.Forged):
                crypto.chacha_open(bytes(32), bytes(12), b"", bad)


class Varints(unittest.TestCase):
    def test_every_form_is_read(self):
        for case in vectors("varints"):
            r = reader.Reader(unhex(case["hex"]))
            self.assertEqual(r.v(), case["value"])
            r.end()


class Frames(unittest.TestCase):
    def test_every_vector_is_read(self):
        for case in vectors("frames")["frames"]:
            found = frames.read_frames(unhex(case["hex"]))
            self.assertEqual(found, [[case["name"], case["fields"]]])

    def test_what_is_malformed_is_refused(self):
        for case in vectors("frames")["malformed"]:
            with self.assertRaises(reader.Malformed, msg=case["why"]):
                frames.read_frames(unhex(case["hex"]))

    def test_every_truncation_is_refused(self):
        for case in vectors("frames")["frames"]:
            whole = unhex(case["hex"])
            for n in range(1, len(whole)):
                with self.assertRaises(reader.Malformed, msg=case["name"]):
                    frames.read_frames(whole[:n])


class Packets(unittest.TestCase):
    def test_every_packet_opens(self):
        told = vectors("packets")
        for case in told["packets"]:
            keys = protection.Direction(
                case["suite"], unhex(told["noise_key_" + case["sender"]]), unhex(told["transcript"])
            )
            packet = unhex(case["packet"])
            self.assertEqual(packets.read_parts(packet)["cid"], case["cid"])
            near = case["number"] - 1 if case["number"] else None
            opened = keys.open(packet, case["path"], near, case["generation"])
            self.assertEqual(opened["number"], case["number"])
            self.assertEqual(opened["frames"], case["frames"])
            for flipped in (0, 8, 9, len(packet) - 1):
                bad = bytearray(packet)
                bad[flipped] ^= 1
                with self.assertRaises(reader.Malformed):
                    keys.open(bytes(bad), case["path"], near, case["generation"])
            with self.assertRaises(reader.Malformed):
                keys.open(packet, case["path"] + 1, near, case["generation"])

    def test_packets_that_only_a_careless_sender_makes_are_refused(self):
        told = vectors("packets")
        for case in told["refused"]:
            key = unhex(told["noise_key_" + case["sender"]])
            keys = protection.Direction(case["suite"], key, unhex(told["transcript"]))
            with self.assertRaises(reader.Malformed, msg=case["why"]) as refused:
                keys.open(unhex(case["packet"]), case["path"], case["number"] - 1, 0)
            self.assertIn("reserved", str(refused.exception))

    def test_numbers_expand_to_the_nearest(self):
        self.assertEqual(protection.number_near(0, None), 0)
        self.assertEqual(protection.number_near(0, 2**32 - 1), 2**32)
        self.assertEqual(protection.number_near(2**32 - 1, 2**32), 2**32 - 1)
        self.assertEqual(protection.number_near(5, 2**33 + 3), 2**33 + 5)


class Handshake(unittest.TestCase):
    def setUp(self):
        self.told = vectors("handshake")

    def test_a_syn_is_read_by_its_server(self):
        syn = unhex(self.told["syn"]["datagram"])
        said = handshake.read_syn(syn, unhex(self.told["server_secret"]))
        self.assertEqual(said["device"], self.told["device_public"])
        fields = self.told["syn"]["fields"] | NO_CLAIMS | {"early_data": None}
        self.assertEqual(said["payload"], fields)
        self.assertFalse(said["address_proved"])

    def test_a_cookie_proves_the_address(self):
        server = unhex(self.told["server_public"])
        told = self.told["cookie"]
        said = handshake.read_cookie(
            unhex(told["datagram"]), server, unhex(self.told["syn"]["mac1"])
        )
        self.assertEqual(said["cookie"], told["cookie"])
        syn = unhex(self.told["syn"]["datagram"])[:-16] + unhex(told["mac2"])
        said = handshake.read_syn(syn, unhex(self.told["server_secret"]), unhex(told["cookie"]))
        self.assertTrue(said["address_proved"])

    def test_a_syn_ack_gives_both_ends_the_same_keys(self):
        told = self.told
        initiator = noise.Initiator(
            handshake.PROLOGUE,
            unhex(told["device_secret"]),
            unhex(told["device_ephemeral_secret"]),
            unhex(told["server_public"]),
            unhex(told["syn"]["payload"]),
        )
        self.assertEqual(unhex(told["syn"]["datagram"])[9:-32], initiator.message_1)
        said = handshake.read_syn_ack(unhex(told["syn_ack"]["datagram"]), initiator)
        self.assertEqual(said["payload"], told["syn_ack"]["fields"])
        keys = [told[n] for n in ("noise_key_initiator", "noise_key_responder", "transcript")]
        self.assertEqual([k.hex() for k in initiator.split()], keys)

    def test_the_other_answers_are_read(self):
        for case in self.told["other_syn_ack_payloads"]:
            said = handshake.read_syn_ack_payload(unhex(case.pop("payload")))
            self.assertEqual(said, case)

    def test_a_welcome_without_a_ticket_may_say_so_in_any_way(self):
        welcome = unhex(self.told["syn_ack"]["payload"])
        follows = bytes(76 + 32)
        for end in (b"", b"\0", b"\0" + follows, b"\2" + follows, b"\xff"):
            said = handshake.read_syn_ack_payload(welcome + end)
            self.assertEqual(said, self.told["syn_ack"]["fields"])

    def test_a_ticket_that_is_cut_is_refused(self):
        welcome = unhex(self.told["syn_ack"]["payload"]) + b"\1"
        for n in range(76 + 32):
            with self.assertRaises(reader.Malformed, msg=n):
                handshake.read_syn_ack_payload(welcome + bytes(n))
        # What follows it is not read.
        for n in (0, 1, 9):
            said = handshake.read_syn_ack_payload(welcome + bytes(76 + 32 + n))
            self.assertEqual(said["ticket"], [76 * "00", 32 * "00"])

    def test_there_is_no_answer_6(self):
        with self.assertRaisesRegex(reader.Malformed, "kind 6"):
            handshake.read_syn_ack_payload(b"\6" + bytes(200))


class Wake(unittest.TestCase):
    """Section 3.6."""

    def setUp(self):
        self.told = vectors("wake")
        self.datagram = unhex(self.told["wake"]["datagram"])
        self.given = {n: self.told[n] for n in ("server_secret", "device_public", "ticket_secret")}

    def initiator(self, payload):
        told = {n: unhex(value) for n, value in self.told.items() if isinstance(value, str)}
        prologue = handshake.wake_prologue(
            told["server_public"], told["device_public"], told["ticket"]
        )
        self.assertEqual(prologue, told["prologue"])
        psk, ephemeral = told["ticket_secret"], told["device_ephemeral_secret"]
        return noise.PskInitiator(prologue, psk, ephemeral, payload)

    def said(self, message, first=b"\x61"):
        """A WAKE with that Noise message, mac1 right."""
        told = self.told
        wake = first + unhex(told["wake"]["cid"]) + unhex(told["ticket"]) + message
        return wake + handshake.mac1_of(unhex(told["server_public"]), wake) + bytes(16)

    def assert_refused(self, datagram, why, given=None):
        with self.assertRaisesRegex(reader.Malformed, why):
            decode.wake(datagram, given or self.given)

    def test_its_parts_are_in_clear(self):
        parts = packets.read_parts(self.datagram)
        told = self.told["wake"]
        self.assertEqual(parts.pop("message"), self.datagram[85:-32].hex())
        clear = {"kind": "WAKE", "cid": told["cid"], "ticket": self.told["ticket"]}
        self.assertEqual(parts, clear | {"mac1": told["mac1"], "mac2": 32 * "0"})
        head = packets.read_head(self.datagram)
        rest = self.datagram[9:].hex()
        clear = {"kind": "WAKE", "version": 1, "cid": told["cid"], "rest": rest}
        self.assertEqual(head, clear)

    def test_it_is_read_by_who_knows_the_ticket(self):
        fields = self.told["wake"]["fields"] | NO_CLAIMS | {"early_data": None}
        told = {"cid": self.told["wake"]["cid"], "ticket": self.told["ticket"], "payload": fields}
        self.assertEqual(decode.wake(self.datagram, self.given), told)
        payload = unhex(self.told["wake"]["payload"])
        self.assertEqual(self.said(self.initiator(payload).message_1), self.datagram)

    def test_nobody_else_reads_it(self):
        for name in ("device_public", "ticket_secret"):
            other = self.given | {name: 32 * "07"}
            self.assert_refused(self.datagram, "authenticate", other)
        other = self.given | {"server_secret": 32 * "07"}
        self.assert_refused(self.datagram, "mac1", other)

    def test_a_changed_one_is_refused(self):
        # cid, ticket, e, payload, tag, mac1; then the same but for mac1, which is made anew.
        end = len(self.datagram) - 32
        for at in (1, 9, 84, 85, 117, end - 1, end, end + 15):
            bad = bytearray(self.datagram)
            bad[at] ^= 1
            self.assert_refused(bytes(bad), "mac1")
        for at in (9, 84, 85, 117, end - 1):
            bad = bytearray(self.datagram[:-32])
            bad[at] ^= 1
            mac1 = handshake.mac1_of(unhex(self.told["server_public"]), bytes(bad))
            self.assert_refused(bytes(bad) + mac1 + bytes(16), "authenticate")
        # mac2 proves an address and nothing else.
        decode.wake(self.datagram[:-16] + 16 * b"\1", self.given)

    def test_other_kinds_versions_and_sizes_are_refused(self):
        message = self.datagram[85:-32]
        self.assert_refused(self.said(message, b"\x81"), "not a WAKE")
        self.assert_refused(unhex(vectors("handshake")["syn"]["datagram"]), "not a WAKE")
        self.assert_refused(self.said(message, b"\x62"), "version 2")
        payload = unhex(self.told["wake"]["payload"])
        self.assert_refused(self.datagram[:159], "below 160")
        decode.wake(self.said(self.initiator(payload[:-1]).message_1), self.given)
        decode.wake(self.said(self.initiator(payload + b"\0").message_1), self.given)
        for n in range(packets.SYN_MIN):
            with self.assertRaises(reader.Malformed, msg=n):
                packets.read_parts(self.datagram[:n])

    def test_a_malformed_payload_is_refused(self):
        payload = unhex(self.told["wake"]["payload"])
        bare = payload.rstrip(b"\0")
        self.assertEqual(bare[-1], 7)
        for rest, why in (
            ("41", "65 claims"),
            ("02 00 02250001 02250001", "twice"),
            ("ff 01 01", "PING"),
        ):
            bad = (bare + unhex(rest)).ljust(len(payload), b"\0")
            self.assert_refused(self.said(self.initiator(bad).message_1), why)
        claim = (bare + unhex("01 00 02250001")).ljust(len(payload), b"\0")
        said = decode.wake(self.said(self.initiator(claim).message_1), self.given)
        claim = {"flow": 2, "received": 37, "credit": 0, "complete": True}
        self.assertEqual(said["payload"]["claims"], [claim])

    def test_a_syn_ack_gives_both_ends_the_same_keys(self):
        told = self.told
        initiator = self.initiator(unhex(told["wake"]["payload"]))
        said = handshake.read_syn_ack(unhex(told["syn_ack"]["datagram"]), initiator)
        self.assertEqual(said, {"cid": told["wake"]["cid"], "payload": told["syn_ack"]["fields"]})
        keys = [told[n] for n in ("noise_key_initiator", "noise_key_responder", "transcript")]
        self.assertEqual([k.hex() for k in initiator.split()], keys)

    def test_the_ticket_says_of_which_pattern_a_syn_ack_is(self):
        for name, asked, other in (("wake", "wake", "handshake"), ("handshake", "syn", "wake")):
            told = vectors(name)
            given = {
                "device_secret": told["device_secret"],
                "device_ephemeral": told["device_ephemeral_secret"],
                "server_public": told["server_public"],
                "payload": told[asked]["payload"],
                "ticket": [told["ticket"], told["ticket_secret"]] if name == "wake" else None,
            }
            initiator = decode.initiator_of(given)
            said = handshake.read_syn_ack(unhex(told["syn_ack"]["datagram"]), initiator)
            self.assertEqual(said["payload"], told["syn_ack"]["fields"])
            with self.assertRaises(reader.Malformed):
                answer = unhex(vectors(other)["syn_ack"]["datagram"])
                handshake.read_syn_ack(answer, decode.initiator_of(given))

    def test_an_ephemeral_key_that_gives_zero_ends_the_handshake(self):
        initiator = self.initiator(unhex(self.told["wake"]["payload"]))
        with self.assertRaisesRegex(reader.Malformed, "zero"):
            initiator.read_2(bytes(48))


class EarlyData(unittest.TestCase):
    """Section 3.5, in a SYN of epoch 5."""

    FIELDS = {
        "instance": 77,
        "epoch": 5,
        "suites": [1],
        "session_credit": 16,
        "flow_credit": 8,
        "cids": ["0202020202020202"],
    }
    PAYLOAD = unhex("000000000000004d 00000005 01 01 10 08 01 0202020202020202")
    # Counter 1 of the device in epoch 5, of the server in epoch 5, of the device in epoch 6.
    OURS, THEIRS, TO_COME = "8a000002", "8a000003", "8c000002"
    OPEN = "10" + OURS + "00 03 00 00"
    DATA = "08" + OURS + "00 03 616263"
    FIN = "09" + OURS + "03 00"

    def read(self, rest):
        return handshake.read_syn_payload(self.PAYLOAD + unhex(rest))

    def early(self, told):
        """Read as early data with its length before it and padding behind."""
        return self.read(f"ff {0x4000 + len(unhex(told)):04x} {told} 00 ff 00")

    def assert_read(self, said, told):
        fields = self.FIELDS | NO_CLAIMS | {"early_data": unhex(told).hex()}
        self.assertEqual(said, fields)

    def assert_refused(self, told, why=""):
        with self.assertRaisesRegex(reader.Malformed, why, msg=told):
            self.early(told)

    def test_it_stands_in_place_of_claims(self):
        highest = "8bfffffe"
        for told in (
            "",
            self.OPEN,
            self.DATA,
            self.OPEN + self.DATA + self.FIN,
            self.FIN + self.DATA + self.OPEN,
            self.OPEN + "08 00 00 01 61" + self.DATA,
            "08" + highest + "00 00",
            "00" + self.OPEN + "0000",
            # Flags without a name, a priority beyond 7.
            "10" + self.OURS + "f8 ff 00 00",
        ):
            self.assert_read(self.early(told), told)
        self.assert_read(self.read("ff 00"), "")

    def test_its_length_may_have_any_form(self):
        for length in ("0a", "400a", "8000000a", "c00000000000000a"):
            self.assert_read(self.read("ff" + length + self.DATA), self.DATA)

    def test_without_it_there_is_none(self):
        for rest in ("", "00", "00 ff 00", "01 00 02 25 00 01"):
            self.assertIsNone(self.read(rest)["early_data"])

    def test_other_frames_are_refused(self):
        whole = [unhex(case["hex"]).hex() for case in vectors("frames")["frames"]]
        for told in (told for told in whole if told[:2] not in ("00", "08", "09", "10")):
            self.assert_refused(told, "as early data")
            self.assert_refused(self.OPEN + told, "as early data")
            self.assert_refused(told + self.DATA, "as early data")

    def test_what_is_malformed_is_refused(self):
        for case in vectors("frames")["malformed"]:
            self.assert_refused(case["hex"])
        self.assert_refused("ff")
        self.assert_refused(self.OPEN + "08" + self.OURS + "ffffffffffffffff 01 61")

    def test_flows_the_device_may_not_open_are_refused(self):
        beyond = "c200000000000000"
        for flow, why in (
            (self.THEIRS, "the server's"),
            ("01", "the server's"),
            (self.TO_COME, "to come"),
            (beyond, "flow id"),
        ):
            for told in (f"10 {flow} 00 03 00 00", f"08 {flow} 00 01 61", f"09 {flow} 00 00"):
                self.assert_refused(told, why)
                self.assert_refused(self.OPEN + told, why)

    def test_every_truncation_is_refused(self):
        rest = unhex("ff 13" + self.OPEN + self.DATA).hex()
        self.assert_read(self.read(rest), self.OPEN + self.DATA)
        for n in range(2, len(rest), 2):
            with self.assertRaises(reader.Malformed, msg=n):
                self.read(rest[:n])
        # The length cuts a frame; the bytes go on.
        for told in (self.OPEN, self.DATA, self.FIN):
            whole = unhex(told)
            for n in range(1, len(whole)):
                self.assert_refused(whole[:n].hex())
                with self.assertRaises(reader.Malformed, msg=told):
                    self.read(f"ff {n:02x} {told}")

    def test_no_other_number_of_claims_means_it(self):
        for count in range(65, 255):
            with self.assertRaisesRegex(reader.Malformed, f"{count} claims"):
                self.read(f"{count:02x} 0a {self.DATA}" + 300 * "00")

    def test_a_server_reads_it_in_a_syn(self):
        told = vectors("handshake")
        for frame, taken in ((self.DATA, True), ("01", False)):
            payload = self.PAYLOAD + unhex(f"ff {len(unhex(frame)):02x} {frame}")
            initiator = noise.Initiator(
                handshake.PROLOGUE,
                unhex(told["device_secret"]),
                unhex(told["device_ephemeral_secret"]),
                unhex(told["server_public"]),
                payload.ljust(1063, b"\0"),
            )
            syn = b"\x81" + bytes(8) + initiator.message_1
            syn += handshake.mac1_of(unhex(told["server_public"]), syn) + bytes(16)
            if taken:
                said = handshake.read_syn(syn, unhex(told["server_secret"]))
                self.assert_read(said["payload"], frame)
            else:
                with self.assertRaisesRegex(reader.Malformed, "PING as early data"):
                    handshake.read_syn(syn, unhex(told["server_secret"]))


class HybridKeys(unittest.TestCase):
    def setUp(self):
        self.told = vectors("hybrid")

    def bytes_of(self, *names):
        return [unhex(self.told[name]) for name in names]

    def test_an_exchange_gives_the_secret_of_the_vectors(self):
        device, server = self.bytes_of("device_seed", "server_seed")
        key, pair = mlkem.key_pair(device)
        ciphertext, shared = mlkem.encapsulate(key, server)
        self.assertEqual([key, ciphertext, shared], self.bytes_of("encapsulation_key", "ciphertext", "shared"))
        self.assertEqual(mlkem.decapsulate(pair, ciphertext), shared)
        self.assertTrue(mlkem.is_key(key))
        self.assertFalse(mlkem.is_key(b"\xff" * 1184))
        other = bytes([ciphertext[0] ^ 1]) + ciphertext[1:]
        self.assertNotEqual(mlkem.decapsulate(pair, other), shared)

    def test_hybrid_keys_open_the_packets_of_the_vectors(self):
        names = ("noise_key_initiator", "noise_key_responder", "transcript")
        names += ("encapsulation_key", "ciphertext", "shared")
        keys = protection.exchanged(*self.bytes_of(*names))
        for name, value in keys.items():
            self.assertEqual(value.hex(), self.told[name])
        for case in self.told["packets"] + self.told["with_secret"]:
            noise_key = unhex(self.told["noise_key_" + case["sender"]])
            hybrid = "generation" in case
            secret = b"" if hybrid else keys["secret"]
            sender = protection.Direction(case["suite"], noise_key, *self.bytes_of("transcript"), secret)
            newest = case.get("generation", 0)
            if hybrid:
                with self.assertRaises(reader.Malformed):
                    sender.open(unhex(case["packet"]), case["path"], None, newest)
                sender.hybrid_root = keys["root_" + case["sender"]]
            opened = sender.open(unhex(case["packet"]), case["path"], None, newest)
            self.assertEqual((opened["number"], opened["frames"]), (case["number"], case["frames"]))

    def test_key_shares_are_halves(self):
        halves = [frames.read_frames(unhex(share))[0] for share in self.told["key_shares"]]
        self.assertEqual([half["half"] for _, half in halves], [0, 1, 0, 1])
        joined = ["".join(half["bytes"] for _, half in halves[at : at + 2]) for at in (0, 2)]
        self.assertEqual(joined, [self.told["encapsulation_key"], self.told["ciphertext"]])


class Records(unittest.TestCase):
    def test_every_record_is_read(self):
        for case in vectors("records")["records"]:
            said = records.read_record(unhex(case.pop("hex")))
            self.assertEqual(said, case)

    def test_damaged_ones_are_refused(self):
        for case in vectors("records")["damaged"]:
            with self.assertRaises(reader.Malformed, msg=case["why"]):
                records.read_record(unhex(case["hex"]))

    def test_every_truncation_is_refused(self):
        for case in vectors("records")["records"]:
            whole = unhex(case["hex"])
            for n in range(len(whole)):
                with self.assertRaises(reader.Malformed, msg=n):
                    records.read_record(whole[:n])


if __name__ == "__main__":
    unittest.main()
