// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package draclient

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
	healthv1alpha1 "k8s.io/kubelet/pkg/apis/dra-health/v1alpha1"
	drav1 "k8s.io/kubelet/pkg/apis/dra/v1"
	drav1beta1 "k8s.io/kubelet/pkg/apis/dra/v1beta1"
)

// DefaultTimeout bounds a call of Prepare or Unprepare, as it does in the kubelet.
const DefaultTimeout = 45 * time.Second

// reconnect is how long gRPC waits between attempts to connect, during which calls fail at once. By default it would be up to two
// minutes, which suits a distant server, not a socket of this machine.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}

// ErrClosed is what every call on a closed Client fails with.
var ErrClosed = errors.New("the connection to the plugin has been closed")

// Services in the order in which we prefer them.
var (
	draServices    = []string{drav1.DRAPluginService, drav1beta1.DRAPluginService}
	healthServices = []string{healthv1.DRAResourceHealthService, healthv1alpha1.DRAResourceHealthService}
)

// Plugin is what a plugin says of itself when it registers (pluginregistration v1, PluginInfo).
type Plugin struct {
	// Driver is the DRA driver's name.
	Driver string
	// Endpoint is the path of the plugin's socket.
	Endpoint string
	// Services are the gRPC services that it serves, for instance "v1.DRAPlugin".
	Services []string
}

// Client calls one plugin. It can be used by several goroutines at once. It must be closed.
type Client struct {
	plugin  Plugin
	timeout time.Duration
	conn    *grpc.ClientConn
	closed  atomic.Bool

	dra           drav1.DRAPluginClient
	draService    string
	health        healthv1.DRAResourceHealthClient // nil when the plugin does not report health
	healthService string
}

// New makes a client. It fails if the plugin serves no version of the DRA service that we speak. It does not need the
// plugin to be there: calls fail while it is not, and the caller tries again later. A call takes no longer than timeout; 0 stands for
// DefaultTimeout.
func New(plugin Plugin, timeout time.Duration, options ...grpc.DialOption) (*Client, error) {
	c := &Client{plugin: plugin, timeout: timeout}
	if c.timeout == 0 {
		c.timeout = DefaultTimeout
	}
	if plugin.Driver == "" || plugin.Endpoint == "" {
		return nil, fmt.Errorf("plugin %+v: needs a driver name and an endpoint", plugin)
	}
	if c.draService = choose(draServices, plugin.Services); c.draService == "" {
		return nil, fmt.Errorf("plugin of driver %s at %s serves %q: want one of %q", plugin.Driver, plugin.Endpoint,
			plugin.Services, draServices)
	}
	c.healthService = choose(healthServices, plugin.Services)

	var err error
	c.conn, err = grpc.NewClient("unix:"+plugin.Endpoint, append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: reconnect, MinConnectTimeout: reconnect.MaxDelay}),
	}, options...)...)
	if err != nil {
		return nil, fmt.Errorf("connecting to the plugin of driver %s at %s: %w", plugin.Driver, plugin.Endpoint, err)
	}
	switch c.draService {
	case drav1.DRAPluginService:
		c.dra = drav1.NewDRAPluginClient(c.conn)
	case drav1beta1.DRAPluginService:
		c.dra = drav1beta1.V1Beta1ClientWrapper{DRAPluginClient: drav1beta1.NewDRAPluginClient(c.conn)}
	}
	switch c.healthService {
	case healthv1.DRAResourceHealthService:
		c.health = healthv1.NewDRAResourceHealthClient(c.conn)
	case healthv1alpha1.DRAResourceHealthService:
		c.health = healthv1.V1Alpha1ClientWrapper{Client: healthv1alpha1.NewDRAResourceHealthClient(c.conn)}
	}
	return c, nil
}

// choose returns the first of ours that is among theirs, or "".
func choose(ours, theirs []string) string {
	for _, service := range ours {
		if slices.Contains(theirs, service) {
			return service
		}
	}
	return ""
}

// Plugin is what the client was made for.
func (c *Client) Plugin() Plugin { return c.plugin }

// Service is the DRA service in use, for instance "v1.DRAPlugin".
func (c *Client) Service() string { return c.draService }

// HealthService is the health service in use, or "" when the plugin has none that we speak.
func (c *Client) HealthService() string { return c.healthService }

// Prepare asks the plugin to prepare claims. An error means that nothing is known about any of them. Otherwise the answer holds exactly
// one entry for each claim, by UID, which may itself hold an error.
func (c *Client) Prepare(ctx context.Context, claims []*drav1.Claim) (map[string]*drav1.NodePrepareResourceResponse, error) {
	return call(ctx, c, "NodePrepareResources", claims, func(ctx context.Context) (map[string]*drav1.NodePrepareResourceResponse, error) {
		response, err := c.dra.NodePrepareResources(ctx, &drav1.NodePrepareResourcesRequest{Claims: claims})
		return response.GetClaims(), err
	})
}

// Unprepare is the opposite of Prepare, with the same promises.
func (c *Client) Unprepare(ctx context.Context, claims []*drav1.Claim) (map[string]*drav1.NodeUnprepareResourceResponse, error) {
	return call(ctx, c, "NodeUnprepareResources", claims, func(ctx context.Context) (map[string]*drav1.NodeUnprepareResourceResponse, error) {
		response, err := c.dra.NodeUnprepareResources(ctx, &drav1.NodeUnprepareResourcesRequest{Claims: claims})
		return response.GetClaims(), err
	})
}

// WatchHealth opens the stream of device health. It lives until ctx ends or the plugin ends it.
func (c *Client) WatchHealth(ctx context.Context) (healthv1.DRAResourceHealth_NodeWatchResourcesClient, error) {
	if c.health == nil {
		return nil, c.wrap("NodeWatchResources", fmt.Errorf("the plugin serves %q, none of %q", c.plugin.Services, healthServices))
	}
	stream, err := c.health.NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
	if err != nil {
		return nil, c.wrap("NodeWatchResources", err)
	}
	return stream, nil
}

// Close ends the connection and every call on it. It is final, and can be called again.
func (c *Client) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	return c.conn.Close()
}

func call[T any](ctx context.Context, c *Client, method string, claims []*drav1.Claim,
	invoke func(context.Context) (map[string]*T, error),
) (map[string]*T, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	answers, err := invoke(ctx)
	if err != nil {
		return nil, c.wrap(method, err)
	}
	for _, claim := range claims {
		if answers[claim.Uid] == nil {
			return nil, c.wrap(method, fmt.Errorf("the answer leaves out claim %s/%s (%s)", claim.Namespace, claim.Name, claim.Uid))
		}
	}
	for uid := range answers {
		if !slices.ContainsFunc(claims, func(claim *drav1.Claim) bool { return claim.Uid == uid }) {
			return nil, c.wrap(method, fmt.Errorf("the answer holds claim %s, which was not asked for", uid))
		}
	}
	return answers, nil
}

func (c *Client) wrap(method string, err error) error {
	if c.closed.Load() {
		err = errors.Join(ErrClosed, err)
	}
	return fmt.Errorf("%s of driver %s at %s: %w", method, c.plugin.Driver, c.plugin.Endpoint, err)
}
