// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package sharing

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// PersistenceDaemon is nvidia-persistenced. It keeps GPUs open, so that their driver forgets nothing while nobody uses them, and lets go of
// one that it is told to let go of. NVML does not tell it, and sees what it does only where its socket is in the same place.
type PersistenceDaemon interface {
	// Keeps tells whether a daemon runs and keeps the GPU at the PCI address open, and in which process; 0 if that cannot be told.
	Keeps(ctx context.Context, address string) (keeps bool, pid uint32, err error)
	// Keep has the daemon keep the GPU open, or let go of it. The error wraps ErrPersistencedRefuses or, where one is to keep it and none
	// runs, ErrNoPersistenced; any other is none of the daemon's.
	Keep(ctx context.Context, address string, on bool) error
}

var (
	// ErrNoPersistenced means that no nvidia-persistenced runs.
	ErrNoPersistenced = errors.New("nvidia-persistenced does not run")
	// ErrPersistencedRefuses means that it has answered, and does not do it.
	ErrPersistencedRefuses = errors.New("it refuses")
)

// persistenced asks the daemon by its own protocol, Sun RPC (RFC 5531) on a socket, as nvidia-smi and NVML do: nvpd_rpc.h in NVIDIA's
// nvidia-persistenced has the numbers. nvidia-smi is not run for it: it says success for a mode that it could not
// switch, opens all GPUs, and takes memory for as many files as it may open, which in a container may be a thousand
// millions (NVIDIA/nvidia-container-toolkit 1053).
type persistenced struct {
	// sockets are where the daemon's may be: in the driver's container, or on the host.
	sockets []string
}

const (
	persistencedProgram = 35006
	persistencedVersion = 1
	// Procedures: the first also takes a GPU's memory from the host's NUMA nodes and gives it back.
	setPersistenceMode = 1
	getPersistenceMode = 2
)

// status is an answer of the daemon that is not success.
type status uint32

// Those that it may give. statusUnknownGPU is for a GPU that was not there when the daemon was started.
const (
	statusUnknownGPU status = 2
	statusDriver     status = 3
	statusMemory     status = 10
)

func (s status) Error() string {
	what := map[status]string{
		statusUnknownGPU: ": it does not know the GPU", statusDriver: ": the driver failed it",
		statusMemory: ": the GPU's memory could not be taken from the host, or given to it",
	}
	return fmt.Sprintf("%v with status %d%s", ErrPersistencedRefuses, uint32(s), what[s])
}

func (s status) Is(target error) bool { return target == ErrPersistencedRefuses || target == error(s) }

// newPersistenced looks for the socket below the driver's root and the host's. /var/run comes last:
// it may link to the /run of this container.
func newPersistenced(opts DriverOptions) *persistenced {
	p := &persistenced{}
	for _, root := range slices.Compact([]string{cmp.Or(opts.DriverRoot, "/"), cmp.Or(opts.HostRoot, "/")}) {
		for _, run := range []string{"run", "var/run"} {
			p.sockets = append(p.sockets, filepath.Join(root, run, "nvidia-persistenced/socket"))
		}
	}
	return p
}

// Keeps implements PersistenceDaemon.
func (p *persistenced) Keeps(ctx context.Context, address string) (bool, uint32, error) {
	results, pid, err := p.ask(ctx, address, getPersistenceMode)
	switch {
	case errors.Is(err, ErrNoPersistenced), errors.Is(err, statusUnknownGPU):
		return false, 0, nil
	case err == nil && len(results) == 0:
		err = errNoReply
	}
	if err != nil {
		return false, 0, fmt.Errorf("ask nvidia-persistenced for %s: %w", address, err)
	}
	return results[0] != 0, pid, nil
}

// Keep implements PersistenceDaemon.
func (p *persistenced) Keep(ctx context.Context, address string, on bool) error {
	mode, what := uint32(0), "let go of"
	if on {
		mode, what = 1, "keep"
	}
	_, _, err := p.ask(ctx, address, setPersistenceMode, mode)
	switch {
	case err == nil, !on && (errors.Is(err, ErrNoPersistenced) || errors.Is(err, statusUnknownGPU)):
		return nil
	}
	return fmt.Errorf("have nvidia-persistenced %s %s: %w", what, address, err)
}

// ask calls a procedure for a GPU, and returns what comes after the status, and the daemon's process.
func (p *persistenced) ask(ctx context.Context, address string, procedure uint32,
	more ...uint32,
) (results []uint32, pid uint32, err error) {
	var domain, bus, slot, function uint32
	if _, err := fmt.Sscanf(address, "%x:%x:%x.%x", &domain, &bus, &slot, &function); err != nil {
		return nil, 0, fmt.Errorf("PCI address %q: %w", address, err)
	}
	connection, err := p.connect(ctx)
	if err != nil {
		return nil, 0, err
	}
	defer connection.Close()
	defer context.AfterFunc(ctx, func() { _ = connection.SetDeadline(time.Unix(1, 0)) })()
	results, err = call(connection, procedure, append([]uint32{domain, bus, slot, function}, more...))
	switch cause := context.Cause(ctx); {
	case err != nil && cause != nil:
		return nil, 0, fmt.Errorf("it does not answer: %w", cause)
	case err != nil:
		return nil, 0, err
	case results[0] != 0:
		return nil, 0, status(results[0])
	}
	return results[1:], peer(connection), nil
}

// connect returns ErrNoPersistenced if there is no socket, or none that a daemon listens on: one that was killed leaves its own.
func (p *persistenced) connect(ctx context.Context) (*net.UnixConn, error) {
	for _, socket := range p.sockets {
		if _, err := os.Stat(socket); errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
			continue
		}
		connection, err := new(net.Dialer).DialContext(ctx, "unix", socket)
		if err == nil {
			return connection.(*net.UnixConn), nil
		}
		if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ECONNREFUSED) {
			return nil, err
		}
	}
	return nil, ErrNoPersistenced
}

// peer is the process that listens, as this one's PID namespace has it; 0 if that cannot be told.
func peer(connection *net.UnixConn) (pid uint32) {
	raw, err := connection.SyscallConn()
	if err != nil {
		return 0
	}
	_ = raw.Control(func(fd uintptr) {
		if of, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = uint32(of.Pid)
		}
	})
	return pid
}

const (
	lastFragment = 1 << 31 // in a record mark, beside the length
	// maxReply in bytes: an answer has some 30.
	maxReply = 4 << 10
	rpcCall  = 0
	rpcReply = 1
)

var errNoReply = errors.New("its answer is none of Sun RPC")

// call is one call by Sun RPC, without credentials. All that is sent and answered are words of 32 bits. There is at least one result.
func call(connection io.ReadWriter, procedure uint32, arguments []uint32) ([]uint32, error) {
	const id, rpcVersion = 1, 2
	words := append([]uint32{id, rpcCall, rpcVersion, persistencedProgram, persistencedVersion, procedure, 0, 0, 0, 0}, arguments...)
	request := binary.BigEndian.AppendUint32(nil, lastFragment|uint32(4*len(words)))
	for _, word := range words {
		request = binary.BigEndian.AppendUint32(request, word)
	}
	if _, err := connection.Write(request); err != nil {
		return nil, err
	}
	reply, err := readRecord(connection)
	if err != nil {
		return nil, err
	}
	// The call's number, that it is a reply, that the call was accepted, and a verifier: its kind and length, and as many bytes.
	switch {
	case len(reply) < 5 || reply[0] != id || reply[1] != rpcReply:
		return nil, errNoReply
	case reply[2] != 0:
		return nil, fmt.Errorf("it rejects the call (%d)", reply[3])
	}
	verifier, reply := (int64(reply[4])+3)/4, reply[5:]
	if verifier >= int64(len(reply)) {
		return nil, errNoReply
	}
	done, results := reply[verifier], reply[verifier+1:]
	switch {
	case done != 0:
		return nil, fmt.Errorf("it does not do the call (%d)", done)
	case len(results) == 0:
		return nil, errNoReply
	}
	return results, nil
}

// readRecord reads the fragments of one record.
func readRecord(r io.Reader) (words []uint32, err error) {
	var record []byte
	for last := false; !last; {
		var mark [4]byte
		if _, err := io.ReadFull(r, mark[:]); err != nil {
			return nil, err
		}
		size := binary.BigEndian.Uint32(mark[:])
		last = size&lastFragment != 0
		size &^= lastFragment
		if int64(len(record))+int64(size) > maxReply || size == 0 && !last {
			return nil, errNoReply
		}
		fragment := make([]byte, size)
		if _, err := io.ReadFull(r, fragment); err != nil {
			return nil, err
		}
		record = append(record, fragment...)
	}
	for ; len(record) >= 4; record = record[4:] {
		words = append(words, binary.BigEndian.Uint32(record))
	}
	return words, nil
}
