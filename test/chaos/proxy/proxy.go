// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

// Package proxy is a bad network between one client and one server: a TCP proxy
// that passes bytes on unread, gives late what the server sends, and cuts
// connections on demand. TLS goes through it from end to end.
//
// A client whose answers and watch events are late decides on a state that is
// not true any more, which is what schedulers beside each other have to bear.
package proxy

import (
	"context"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Proxy listens on a port of its own. All methods may be called by any
// goroutine.
type Proxy struct {
	target   string
	listener net.Listener
	delay    atomic.Int64 // time.Duration
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup

	mu     sync.Mutex
	closed bool
	open   map[*connection]struct{}
}

// Listen starts a proxy on 127.0.0.1 in front of target, which is "host:port".
func Listen(target string) (*Proxy, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("starting a proxy for %s: %w", target, err)
	}
	p := &Proxy{target: target, listener: listener, open: map[*connection]struct{}{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.wg.Go(p.accept)
	return p, nil
}

// Address is "127.0.0.1:<port>".
func (p *Proxy) Address() string { return p.listener.Addr().String() }

// SetDelay has everything that the server sends from now on arrive later by d.
// The order of bytes is kept.
func (p *Proxy) SetDelay(d time.Duration) { p.delay.Store(int64(d)) }

// Cut resets all connections, with what is on its way, and tells how many there
// were. New ones are accepted.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.open {
		c.reset()
	}
	return len(p.open)
}

// Close ends the proxy and its connections and waits for its goroutines.
func (p *Proxy) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.cancel()
	err := p.listener.Close()
	p.Cut()
	p.wg.Wait()
	return err
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return // closed
		}
		p.wg.Go(func() { p.serve(client) })
	}
}

// serve passes one client's bytes on until either side ends.
func (p *Proxy) serve(client net.Conn) {
	var dialer net.Dialer
	server, err := dialer.DialContext(p.ctx, "tcp", p.target)
	if err != nil {
		// The client learns that nobody is there.
		_ = client.(*net.TCPConn).SetLinger(0)
		_ = client.Close()
		return
	}
	c := &connection{client: client.(*net.TCPConn), server: server.(*net.TCPConn), ended: make(chan struct{})}
	if !p.add(c) {
		c.reset()
		return
	}
	defer p.remove(c)

	var directions sync.WaitGroup
	directions.Go(func() {
		defer c.reset()
		_, _ = io.Copy(c.server, c.client) // it ends with the connection
	})
	late := make(chan chunk, 1024)
	directions.Go(func() {
		defer close(late)
		p.read(c, late)
	})
	directions.Go(func() {
		defer c.reset()
		c.deliver(late)
	})
	directions.Wait()
}

func (p *Proxy) add(c *connection) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.open[c] = struct{}{}
	return true
}

func (p *Proxy) remove(c *connection) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.open, c)
}

// read notes when each chunk of the server's is due.
func (p *Proxy) read(c *connection, late chan<- chunk) {
	for {
		buffer := make([]byte, 32<<10)
		n, err := c.server.Read(buffer)
		if n > 0 {
			due := time.Now().Add(time.Duration(p.delay.Load()))
			select {
			case late <- chunk{data: buffer[:n], due: due}:
			case <-c.ended:
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// chunk is what the server sent at once.
type chunk struct {
	data []byte
	due  time.Time
}

// connection is a client's connection with the one to the server behind it.
type connection struct {
	client, server *net.TCPConn
	once           sync.Once
	ended          chan struct{}
}

// deliver gives the client each chunk when it is due.
func (c *connection) deliver(late <-chan chunk) {
	for next := range late {
		timer := time.NewTimer(time.Until(next.due))
		select {
		case <-timer.C:
		case <-c.ended:
			timer.Stop()
			return
		}
		if _, err := c.client.Write(next.data); err != nil {
			return
		}
	}
}

// reset ends both connections at once: the other side sees a reset, not an end
// in good order.
func (c *connection) reset() {
	c.once.Do(func() {
		close(c.ended)
		for _, conn := range []*net.TCPConn{c.client, c.server} {
			// They fail when the other side has closed it, which is as good.
			_ = conn.SetLinger(0)
			_ = conn.Close()
		}
	})
}
