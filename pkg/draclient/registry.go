// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
)

// ErrNotRegistered is what Get fails with for a driver that has no plugin here.
var ErrNotRegistered = errors.New("no plugin of the DRA driver is registered")

// Registry knows the plugins of a node. A driver may have several plugins at once, during a rolling update; the one that registered
// last gets the calls. The zero value is ready for use.
type Registry struct {
	// Timeout is given to every Client.
	Timeout time.Duration
	// Options are given to every Client.
	Options []grpc.DialOption

	mu sync.Mutex
	// Key: driver name. Order: oldest registration first.
	clients map[string][]*Client
	closed  bool
}

// Register adds a plugin. One that registers again under the same driver and endpoint replaces the earlier client, connection and all,
// which is closed.
func (r *Registry) Register(plugin Plugin) error {
	client, err := New(plugin, r.Timeout, r.Options...)
	if err != nil {
		return err
	}
	replaced, err := r.add(client)
	if err != nil {
		return errors.Join(err, client.Close())
	}
	if replaced != nil {
		return replaced.Close()
	}
	return nil
}

func (r *Registry) add(client *Client) (replaced *Client, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, fmt.Errorf("registering driver %s: %w", client.plugin.Driver, ErrClosed)
	}
	if r.clients == nil {
		r.clients = map[string][]*Client{}
	}
	replaced = r.removeLocked(client.plugin.Driver, client.plugin.Endpoint)
	r.clients[client.plugin.Driver] = append(r.clients[client.plugin.Driver], client)
	return replaced, nil
}

// Deregister removes a plugin and closes its client. One that is not there is no error.
func (r *Registry) Deregister(driver, endpoint string) error {
	r.mu.Lock()
	client := r.removeLocked(driver, endpoint)
	r.mu.Unlock()
	if client == nil {
		return nil
	}
	return client.Close()
}

func (r *Registry) removeLocked(driver, endpoint string) *Client {
	clients := r.clients[driver]
	i := slices.IndexFunc(clients, func(c *Client) bool { return c.plugin.Endpoint == endpoint })
	if i < 0 {
		return nil
	}
	client := clients[i]
	if r.clients[driver] = slices.Delete(clients, i, i+1); len(r.clients[driver]) == 0 {
		delete(r.clients, driver)
	}
	return client
}

// Get returns the client for a driver. It stays usable until its plugin is deregistered or replaced; then its calls fail with ErrClosed,
// and the caller asks again.
func (r *Registry) Get(driver string) (*Client, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	clients := r.clients[driver]
	if len(clients) == 0 {
		return nil, fmt.Errorf("driver %s: %w", driver, ErrNotRegistered)
	}
	return clients[len(clients)-1], nil
}

// Close closes every client. It is final: nothing can be registered afterwards.
func (r *Registry) Close() error {
	r.mu.Lock()
	clients := r.clients
	r.clients, r.closed = nil, true
	r.mu.Unlock()
	var errs []error
	for _, of := range clients {
		for _, client := range of {
			errs = append(errs, client.Close())
		}
	}
	return errors.Join(errs...)
}
