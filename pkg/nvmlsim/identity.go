package nvmlsim

import (
	"encoding/binary"
	"fmt"

	"github.com/google/uuid"
)

// namespace of the UUIDs made here (RFC 9562, version 5).
var namespace = uuid.MustParse("8d5f8a0e-6d34-4d0e-9a5e-4f1d8b6c2a77")

// gpuUUID is the identity of a GPU for ever: it follows from the node's name
// and the GPU's index.
func gpuUUID(nodeName string, index int) string {
	return "GPU-" + uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/gpu/%d", nodeName, index)).String()
}

// Identity is equal for two handles of the same object, and can be a key. GPUs and event sets have one handle each; those of
// MIG devices and instances are made by each call that returns them.
func Identity(handle any) any {
	switch h := handle.(type) {
	case *migDevice:
		return *h
	case *gpuInstance:
		return *h
	case *computeInstance:
		return [2]any{*h.parent, computeInstance{id: h.id, number: h.number}}
	}
	return handle
}

// boardSerial is the 13-digit serial number of a board.
func boardSerial(nodeName string, board int) string {
	id := uuid.NewSHA1(namespace, fmt.Appendf(nil, "%s/board/%d", nodeName, board))
	return fmt.Sprintf("165%010d", binary.BigEndian.Uint64(id[:8])%1e10)
}
