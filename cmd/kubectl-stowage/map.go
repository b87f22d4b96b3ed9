// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/cert"

	"stowage.dev/stowage/internal/version"
	"stowage.dev/stowage/pkg/livemap"
	"stowage.dev/stowage/pkg/simulate"
	"stowage.dev/stowage/pkg/snapshot"
)

const (
	// mapAge and mapBytes bound the history.
	mapAge   = time.Hour
	mapBytes = 128 << 20
	// whyAge is how long lists of the cluster are used to answer why pods wait.
	whyAge = 10 * time.Second
)

// mapOptions are the flags of map.
type mapOptions struct {
	engine
	port   int
	open   bool
	listen string
	// certificate and key are files in PEM.
	certificate, key string
}

func (c *cli) mapCommand() *cobra.Command {
	var o mapOptions
	command := &cobra.Command{
		Use: "map", Short: "Serve a live map of the GPUs to your browser",
		Long: `Serve a live map of the GPUs to your browser: nodes, GPUs, partitions and shares with their holders, the pods that wait and
why, and how it was during the time that the command runs, an hour at most.

It listens on this machine alone, and answers to pages that have the secret in the address that it prints. It ends with Ctrl-C.

With --listen it serves others, over TLS, as in manifests/overlays/map: who asks brings a token of the cluster, and has to be allowed to
list what manifests/kubectl/reader.yaml has. It reads with its own account.`,
		Example: "  kubectl stowage map\n" +
			"  kubectl stowage map --port 8080 --open=false   # then: ssh -L 8080:127.0.0.1:8080 HOST\n" +
			"  kubectl stowage map --snapshot cluster.json.gz",
		Args: none,
		RunE: func(command *cobra.Command, _ []string) error {
			if o.port < 0 || o.port > 65535 {
				return usageError{fmt.Errorf("--port: Invalid value: %d: want 0 to 65535", o.port)}
			}
			if err := c.checkListen(command, &o); err != nil {
				return usageError{err}
			}
			return c.serveMap(command.Context(), &o)
		},
	}
	o.addFlags(command)
	command.Flags().IntVar(&o.port, "port", 0, "port on this machine; 0 is one that is free")
	command.Flags().BoolVar(&o.open, "open", true, "open the page in a browser, where there is a desktop")
	command.Flags().StringVar(&o.listen, "listen", "",
		"HOST:PORT on which to serve others over TLS, who bring their tokens of the cluster; :8443 is all addresses")
	command.Flags().StringVar(&o.certificate, "tls-cert-file", "",
		"certificate for --listen, in PEM; without it, one that is made at the start and signed by nobody")
	command.Flags().StringVar(&o.key, "tls-private-key-file", "", "its private key, in PEM")
	return command
}

// checkListen looks at the flags for a server that others reach.
func (c *cli) checkListen(command *cobra.Command, o *mapOptions) error {
	flags := command.Flags()
	switch {
	case (o.certificate == "") != (o.key == ""):
		return errors.New("--tls-cert-file and --tls-private-key-file: one needs the other")
	case o.listen == "" && o.certificate != "":
		return errors.New("--tls-cert-file: needs --listen: on this machine alone the page is served without TLS")
	case o.listen == "":
		return nil
	case c.file != "":
		return errors.New("--listen: needs a cluster, which knows who may read; it has no answer about a snapshot file")
	case flags.Changed("port") || flags.Changed("open"):
		return errors.New("--listen: has a port of its own, and opens no browser: leave --port and --open out")
	}
	if _, _, err := net.SplitHostPort(o.listen); err != nil {
		return fmt.Errorf("--listen: Invalid value: %q: want HOST:PORT", o.listen)
	}
	return nil
}

// listenFor opens the port on which the map is served.
func listenFor(o *mapOptions) (net.Listener, error) {
	if o.listen == "" {
		listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(o.port)))
		if err != nil {
			return nil, fmt.Errorf("--port: %w", err)
		}
		return listener, nil
	}
	certificate, err := certificateOf(o)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	return tls.NewListener(listener,
		&tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, GetCertificate: certificate}), nil
}

// certificateOf returns what finds the certificate of a connection: the files are read each time, so that new ones count at once.
func certificateOf(o *mapOptions) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	load := func() (tls.Certificate, error) { return tls.LoadX509KeyPair(o.certificate, o.key) }
	if o.certificate == "" {
		certificate, key, err := cert.GenerateSelfSignedCertKey("stowage-map", nil, []string{"localhost"})
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		load = func() (tls.Certificate, error) { return tls.X509KeyPair(certificate, key) }
	}
	if _, err := load(); err != nil {
		return nil, fmt.Errorf("--tls-cert-file: %w", err)
	}
	return func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := load()
		return &pair, err
	}, nil
}

// serveMap serves the map until ctx ends.
func (c *cli) serveMap(ctx context.Context, o *mapOptions) error {
	collectInTime()
	listener, err := listenFor(o)
	if err != nil {
		return err
	}
	defer listener.Close()
	feed := livemap.NewFeed(livemap.NewHistory(livemap.Limits{Age: mapAge, Bytes: mapBytes}))
	title := livemap.Title{Version: version.Release()}
	ask := &asker{cli: c, options: o}
	access := livemap.NewAccess()
	var admission livemap.Admission = access
	follow := func(ctx context.Context) error { <-ctx.Done(); return nil }
	if c.file != "" {
		s, err := c.read(ctx)
		if err != nil {
			return err
		}
		if err := feed.Fill(s); err != nil {
			return err
		}
		title.Cluster, title.File, title.Taken = filepath.Base(c.file), true, &s.Taken
		ask.last = s
	} else {
		client, err := c.client()
		if err != nil {
			return err
		}
		if o.listen == "" { // an address that answers nothing is not worth printing, nor a browser
			if err := livemap.MayFollow(ctx, client); err != nil {
				return err
			}
		}
		title.Cluster = c.contextName()
		follow = func(ctx context.Context) error { return feed.Follow(ctx, client) }
		if o.listen != "" {
			config, err := c.cluster.ToRESTConfig()
			if err != nil {
				return err
			}
			config = rest.CopyConfig(config)
			config.QPS, config.Burst, config.RateLimiter = livemap.ReviewQPS, livemap.ReviewBurst, nil
			reviews, err := kubernetes.NewForConfig(config)
			if err != nil {
				return err
			}
			admission = livemap.NewReview(reviews)
		}
	}
	server := livemap.NewServer(title, feed, admission, ask.why).HTTP(10 * time.Second)
	group, ctx := errgroup.WithContext(ctx)
	server.BaseContext = func(net.Listener) context.Context { return ctx }
	group.Go(func() error {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	})
	group.Go(func() error {
		<-ctx.Done()
		return server.Close()
	})
	group.Go(func() error {
		if err := follow(ctx); err != nil && ctx.Err() == nil {
			return err
		}
		return nil
	})
	c.printAddress(listener.Addr().String(), title.Cluster, access, o)
	return group.Wait()
}

// printAddress says where the map is, and opens it.
func (c *cli) printAddress(address, cluster string, access *livemap.Access, o *mapOptions) {
	if o.listen != "" {
		fmt.Fprintf(c.Out, "The map of %s is at https://%s/, for who puts #token= and a token of the cluster behind the address.\n",
			printable(cluster), address)
		return
	}
	fmt.Fprintf(c.Out, "The map of %s is at\n\n  http://%s/#token=%s\n\nKeep this address to yourself. Ctrl-C ends it.\n",
		printable(cluster), address, access.Token)
	if o.open {
		openBrowser("http://" + address + "/#code=" + access.Code())
	}
}

// contextName is what the user calls the cluster.
func (c *cli) contextName() string {
	if name := *c.cluster.Context; name != "" {
		return name
	}
	if config, err := c.cluster.ToRawKubeConfigLoader().RawConfig(); err == nil && config.CurrentContext != "" {
		return config.CurrentContext
	}
	return "the cluster"
}

// asker answers why pods wait. It is asked for one pod at a time.
type asker struct {
	*cli
	options *mapOptions
	last    *snapshot.Snapshot
	at      time.Time
}

// why is what "kubectl stowage why" prints.
func (a *asker) why(ctx context.Context, namespace, pod string) ([]livemap.Line, error) {
	if a.file == "" && (a.last == nil || time.Since(a.at) > whyAge) {
		client, err := a.client()
		if err != nil {
			return nil, err
		}
		if a.last, err = snapshot.Take(ctx, client); err != nil {
			return nil, err
		}
		a.at = time.Now()
	}
	opts, err := a.options.options()
	if err != nil {
		return nil, err
	}
	why, err := simulate.Explain(ctx, &a.last.Objects, namespace, pod, opts)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	printer := *a.cli
	printer.Out, printer.output, printer.color = &out, "", "never"
	if err := printer.printWhy(a.last, why); err != nil {
		return nil, err
	}
	var lines []livemap.Line
	for line := range strings.Lines(out.String()) {
		text := strings.TrimLeft(strings.TrimRight(line, "\n"), " ")
		lines = append(lines, livemap.Line{Indent: min(1, len(line)-len(text)-1), Text: text})
	}
	return lines, nil
}

// openBrowser opens an address, or does nothing: it is printed, too.
func openBrowser(address string) {
	var command *exec.Cmd
	switch {
	case runtime.GOOS == "darwin":
		command = exec.Command("open", address)
	case runtime.GOOS == "windows":
		command = exec.Command("rundll32", "url.dll,FileProtocolHandler", address)
	case cmp.Or(os.Getenv("DISPLAY"), os.Getenv("WAYLAND_DISPLAY")) != "":
		command = exec.Command("xdg-open", address)
	default:
		return
	}
	if command.Start() == nil {
		go func() { _ = command.Wait() }()
	}
}
