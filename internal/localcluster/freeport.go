// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"sync"
)

const (
	// Ports of well-known servers are below, and those of a cluster's services (NodePort) from highestPort on.
	lowestPort, highestPort = 20000, 29999
	// fewestPorts make it unlikely enough that two programs choose the same.
	fewestPorts = 1000

	localPortRange = "/proc/sys/net/ipv4/ip_local_port_range"
)

// given are the ports that this process has chosen already.
var given = struct {
	sync.Mutex
	ports map[int]bool
}{ports: map[int]bool{}}

// FreePort chooses a TCP port on 127.0.0.1 for a server that cannot share one, see [Port]. It is chosen at random where
// the kernel takes none for connections and for listeners on port 0. So it stays free until the server has it, and while
// the server is restarted, unless somebody else chooses the very same.
func FreePort() (int, error) {
	content, err := os.ReadFile(localPortRange)
	if err != nil {
		return 0, fmt.Errorf("choosing a port: %w", err)
	}
	var low, high int
	if _, err := fmt.Sscan(string(content), &low, &high); err != nil {
		return 0, fmt.Errorf("choosing a port: reading %s: %w", localPortRange, err)
	}
	first, last := quietPorts(low, high)
	given.Lock()
	defer given.Unlock()
	failed := errors.New("all have been given")
	for range 100 {
		port := first + rand.IntN(last-first+1)
		if given.ports[port] {
			continue
		}
		listener, err := net.Listen("tcp4", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			failed = err
			continue
		}
		given.ports[port] = true
		return port, listener.Close()
	}
	return 0, fmt.Errorf("no free port was found between %d and %d: %w", first, last, failed)
}

// quietPorts are those that servers of ours are given: none from low to high, which the kernel assigns, if it leaves any.
func quietPorts(low, high int) (first, last int) {
	for _, r := range [][2]int{
		{lowestPort, min(highestPort, low-1)},
		{max(lowestPort, high+1), highestPort},
		{high + 1, 65535},
		{1024, low - 1},
	} {
		if r[1]-r[0]+1 >= fewestPorts {
			return r[0], r[1]
		}
	}
	return lowestPort, highestPort
}
