// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"fmt"
	"net"
	"strconv"

	"golang.org/x/sys/unix"
)

// Port is a TCP port on 127.0.0.1 that nobody else can take before the process
// it is meant for binds it: we keep a socket bound to it, with SO_REUSEPORT
// and without listening. The process must set SO_REUSEPORT too
// (--permit-port-sharing of the Kubernetes components, --socket-reuse-port of
// etcd).
type Port struct {
	Number int
	fd     int
}

// ReservePort reserves a free port. Release gives it back.
func ReservePort() (*Port, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("reserving a port: socket: %w", err)
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("reserving a port: SO_REUSEPORT: %w", err)
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("reserving a port on 127.0.0.1: bind: %w", err)
	}
	addr, err := unix.Getsockname(fd)
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("reserving a port: getsockname: %w", err)
	}
	return &Port{Number: addr.(*unix.SockaddrInet4).Port, fd: fd}, nil
}

// String is the port's number.
func (p *Port) String() string { return strconv.Itoa(p.Number) }

// Address is "127.0.0.1:<port>".
func (p *Port) Address() string { return net.JoinHostPort("127.0.0.1", p.String()) }

// Release gives the reservation up; a process that has bound the port keeps it.
func (p *Port) Release() {
	if p.fd >= 0 {
		unix.Close(p.fd)
		p.fd = -1
	}
}
