// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package maptest

import (
	"io"
	"net"
	"net/url"
	"path/filepath"
	"sync"
	"testing"

	"k8s.io/client-go/tools/clientcmd"
)

// wire is a network between the command and the API server.
type wire struct {
	t      *testing.T
	listen net.Listener
	to     *url.URL

	mu    sync.Mutex
	isCut bool
	conns []net.Conn
}

func newWire(t *testing.T) *wire {
	t.Helper()
	to, err := url.Parse(cluster.AdminConfig().Host)
	if err != nil {
		t.Fatal(err)
	}
	listen, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{t: t, listen: listen, to: to}
	t.Cleanup(func() {
		listen.Close()
		w.cut(true)
	})
	go func() {
		for {
			conn, err := listen.Accept()
			if err != nil {
				return
			}
			w.carry(conn)
		}
	}()
	return w
}

// carry carries what comes both ways. While the wire is cut, nothing is carried, and nobody is told.
func (w *wire) carry(conn net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns = append(w.conns, conn)
	if w.isCut {
		return
	}
	server, err := net.Dial("tcp", w.to.Host)
	if err != nil {
		conn.Close()
		return
	}
	w.conns = append(w.conns, server)
	for _, ends := range [][2]net.Conn{{conn, server}, {server, conn}} {
		go func() {
			_, _ = io.Copy(ends[0], ends[1]) // until one of them is closed
			ends[0].Close()
		}()
	}
}

// cut ends all connections, and lets new ones hang or pass.
func (w *wire) cut(cut bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = cut
	for _, conn := range w.conns {
		conn.Close()
	}
	w.conns = nil
}

// kubeconfig is the administrator's, over the wire.
func (w *wire) kubeconfig() string {
	w.t.Helper()
	config, err := clientcmd.LoadFromFile(cluster.AdminKubeconfig())
	if err != nil {
		w.t.Fatal(err)
	}
	for _, c := range config.Clusters {
		c.Server = "https://" + w.listen.Addr().String()
	}
	name := filepath.Join(w.t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, name); err != nil {
		w.t.Fatal(err)
	}
	return name
}
