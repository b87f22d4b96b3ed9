// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"sigs.k8s.io/controller-runtime/pkg/envtest"
)

// startTimeout is how long etcd and kube-apiserver may take each on a busy
// machine.
const startTimeout = 90 * time.Second

// plane is etcd and kube-apiserver, run by envtest.
type plane struct {
	envtest *envtest.ControlPlane
	clients *authority
	dir     string // certificates of kube-apiserver
	caFile  string // authority of kube-apiserver's serving certificate
	pids    []pidFile
	ports   []*Port
	logs    []*os.File
	started chan struct{} // closed when envtest's Start has returned

	// mu is held while kube-apiserver is started again, and to stop.
	mu      sync.Mutex
	stopped bool
}

// pidFile is where a process started by envtest leaves its process id, which
// envtest does not tell.
type pidFile struct {
	name, path, log string
}

// startPlane starts etcd and kube-apiserver and makes the administrator's
// client.
func (c *Cluster) startPlane(ctx context.Context) error {
	p, err := c.preparePlane()
	if err != nil {
		return err
	}
	c.plane = p
	if err := c.OnStop("etcd and kube-apiserver", p.stop); err != nil {
		close(p.started)
		return err
	}
	if err := p.start(ctx); err != nil {
		return err
	}
	if err := c.makeAdmin(); err != nil {
		return err
	}
	return c.allowKubeletClient(ctx)
}

func (c *Cluster) preparePlane() (*plane, error) {
	clients, err := newAuthority("stowage-clients")
	if err != nil {
		return nil, err
	}
	if c.servingCA, err = newAuthority("stowage-servers"); err != nil {
		return nil, err
	}
	p := &plane{
		clients: clients,
		dir:     filepath.Join(c.dir, "kube-apiserver"),
		started: make(chan struct{}),
		envtest: &envtest.ControlPlane{KubectlPath: c.binaries.Kubectl()},
	}
	if err := os.MkdirAll(p.dir, 0o700); err != nil {
		return nil, err
	}
	if p.envtest.Etcd, err = c.prepareEtcd(p); err != nil {
		return nil, errors.Join(err, p.release())
	}
	if p.envtest.APIServer, err = c.prepareAPIServer(p); err != nil {
		return nil, errors.Join(err, p.release())
	}
	return p, nil
}

func (c *Cluster) prepareEtcd(p *plane) (*envtest.Etcd, error) {
	port, log, path, err := c.prepareChild(p, etcdName, c.binaries.Etcd())
	if err != nil {
		return nil, err
	}
	data := filepath.Join(c.dir, "etcd")
	if err := os.MkdirAll(data, 0o700); err != nil {
		return nil, err
	}
	etcd := &envtest.Etcd{
		Path:         path,
		URL:          &url.URL{Scheme: "http", Host: port.Address()},
		DataDir:      data,
		Out:          log,
		Err:          log,
		StartTimeout: startTimeout,
		StopTimeout:  DefaultStopTimeout,
	}
	// Not even a peer may reach it: there is one member.
	etcd.Configure().
		Set("listen-peer-urls", "http://127.0.0.1:0").
		Set("socket-reuse-port", "true").
		Set("unsafe-no-fsync", "true").
		Set("log-level", "warn")
	return etcd, nil
}

func (c *Cluster) prepareAPIServer(p *plane) (*envtest.APIServer, error) {
	port, log, path, err := c.prepareChild(p, apiServerName, c.binaries.KubeAPIServer())
	if err != nil {
		return nil, err
	}
	certPEM, keyPEM, err := p.clients.clientCertificate(kubeletClientUser, nil)
	if err != nil {
		return nil, err
	}
	kubeletCert, err := c.writeFile(certPEM, "kube-apiserver", "kubelet-client.crt")
	if err != nil {
		return nil, err
	}
	kubeletKey, err := c.writeFile(keyPEM, "kube-apiserver", "kubelet-client.key")
	if err != nil {
		return nil, err
	}
	serversCA, err := c.writeFile(c.servingCA.certPEM, "servers-ca.crt")
	if err != nil {
		return nil, err
	}
	frontProxies, err := newAuthority("stowage-front-proxies")
	if err != nil {
		return nil, err
	}
	frontProxiesCA, err := c.writeFile(frontProxies.certPEM, "front-proxies-ca.crt")
	if err != nil {
		return nil, err
	}

	server := &envtest.APIServer{
		Path:         path,
		CertDir:      p.dir,
		Out:          log,
		Err:          log,
		StartTimeout: startTimeout,
		StopTimeout:  DefaultStopTimeout,
	}
	server.SecureServing.Address = "127.0.0.1"
	server.SecureServing.Port = port.String()
	server.SecureServing.Authn = &clientCertificates{ca: p.clients}

	args := server.Configure().
		Set("authorization-mode", "Node", "RBAC").
		Set("enable-admission-plugins", "NodeRestriction").
		Set("permit-port-sharing", "true").
		Set("kubelet-client-certificate", kubeletCert).
		Set("kubelet-client-key", kubeletKey).
		Set("kubelet-certificate-authority", serversCA).
		Set("kubelet-preferred-address-types", "InternalIP", "Hostname").
		Set("shutdown-delay-duration", "0s").
		// As in a cluster of kubeadm. There is no front proxy here, but components that look for its authority log errors
		// as long as there is none.
		Set("requestheader-client-ca-file", frontProxiesCA).
		Set("requestheader-allowed-names", "front-proxy-client").
		Set("requestheader-username-headers", "X-Remote-User").
		Set("requestheader-group-headers", "X-Remote-Group").
		Set("requestheader-extra-headers-prefix", "X-Remote-Extra-").
		// envtest turns ServiceAccount admission off because it runs no
		// controller manager; we do.
		SetRaw("disable-admission-plugins", noDefault{})
	if c.options.WithoutControllerManager {
		args.Set("disable-admission-plugins", "ServiceAccount")
	}
	if gates := gatesFlag(c.options.FeatureGates); gates != "" {
		args.Set("feature-gates", gates)
	}
	if config := gatesFlag(c.options.RuntimeConfig); config != "" {
		args.Set("runtime-config", config)
	}
	for name, value := range c.options.APIServerArgs {
		args.Set(name, value)
	}
	return server, nil
}

// noDefault is an envtest argument that is not passed, whatever its default.
type noDefault struct{}

func (n noDefault) Append(...string) envtest.Arg { return n }
func (noDefault) Get([]string) []string          { return nil }

// gatesFlag writes a map as --feature-gates and --runtime-config want it.
func gatesFlag(gates map[string]bool) string {
	var pairs []string
	for name, on := range gates {
		pairs = append(pairs, fmt.Sprintf("%s=%t", name, on))
	}
	slices.Sort(pairs)
	return strings.Join(pairs, ",")
}

// prepareChild makes what a process started by envtest needs: a port, a log,
// and a script to run in its place. Through the script the process dies with
// ours (envtest sets no parent-death signal) and tells its process id.
func (c *Cluster) prepareChild(p *plane, name, binary string) (*Port, *os.File, string, error) {
	port, err := ReservePort()
	if err != nil {
		return nil, nil, "", err
	}
	p.ports = append(p.ports, port)
	logPath := filepath.Join(c.LogDir(), name+".log")
	log, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, nil, "", err
	}
	p.logs = append(p.logs, log)

	pid := pidFile{name: name, path: filepath.Join(c.dir, name+".pid"), log: logPath}
	p.pids = append(p.pids, pid)
	// envtest also runs the program with --help, to see which flags it has.
	script := fmt.Sprintf("#!/bin/sh\n[ \"$*\" = --help ] && exec %[3]s --help\necho $$ >%[1]s\nexec %[2]s %[4]d %[3]s \"$@\"\n",
		shellQuote(pid.path), shellQuote(c.binaries.Tether()), shellQuote(binary), os.Getpid())
	path, err := c.writeFile([]byte(script), "run", name)
	if err != nil {
		return nil, nil, "", err
	}
	return port, log, path, os.Chmod(path, 0o700)
}

func shellQuote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// start runs envtest's Start, which knows no context, and ends its processes
// when the context ends meanwhile.
func (p *plane) start(ctx context.Context) error {
	detach := context.AfterFunc(ctx, func() { p.signal(syscall.SIGKILL) })
	defer detach()
	defer close(p.started)

	var err error
	onSpawnThread(func() { err = p.envtest.Start() })
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	if err == nil {
		return nil
	}
	for _, pid := range slices.Backward(p.pids) {
		if _, statErr := os.Stat(pid.path); statErr == nil { // the last one that was begun
			return fmt.Errorf("%w; log %s ends with:\n%s", err, pid.log, LogTail(pid.log))
		}
	}
	return err
}

// stop ends both processes. It waits for a start that is under way.
func (p *plane) stop() error {
	select {
	case <-p.started:
	default:
		p.signal(syscall.SIGKILL)
		<-p.started
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stopped = true
	p.signal(syscall.SIGCONT) // what is paused would not end
	var errs []error
	for _, pid := range p.pids {
		if pid.read() != 0 && !pid.alive() && p.ready() {
			errs = append(errs, &ExitError{Name: pid.name, Err: errors.New("exit status unknown"), LogFile: pid.log, LogTail: LogTail(pid.log)})
		}
	}
	errs = append(errs, p.envtest.Stop())
	// envtest does not wait for what it has killed.
	err := wait.PollUntilContextTimeout(context.Background(), readyInterval, DefaultStopTimeout, true,
		func(context.Context) (bool, error) {
			return !slices.ContainsFunc(p.pids, pidFile.alive), nil
		})
	if err != nil {
		p.signal(syscall.SIGKILL)
		errs = append(errs, fmt.Errorf("waiting for etcd and kube-apiserver to end: %w", err))
	}
	return errors.Join(append(errs, p.release())...)
}

// ready tells whether the start succeeded.
func (p *plane) ready() bool { return p.caFile != "" }

func (p *plane) release() error {
	for _, port := range p.ports {
		port.Release()
	}
	var errs []error
	for _, log := range p.logs {
		errs = append(errs, log.Close())
	}
	return errors.Join(errs...)
}

func (p *plane) signal(sig syscall.Signal) {
	for _, pid := range p.pids {
		if pid.alive() {
			// It can only fail because the process ended just now.
			_ = syscall.Kill(pid.read(), sig)
		}
	}
}

// read returns the process id, or 0 when the process has not been started.
func (f pidFile) read() int {
	data, err := os.ReadFile(f.path)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return 0 // being written
	}
	return pid
}

// alive tells whether the process runs. As its pid could be another's by now,
// only a child of ours counts: it keeps its pid until we have reaped it.
func (f pidFile) alive() bool {
	pid := f.read()
	if pid == 0 {
		return false
	}
	stat, err := readProcStat(pid)
	return err == nil && stat.parent == os.Getpid() && stat.state != 'Z'
}

// ClientCAFile is the certificate of the authority that signs client
// certificates; a kubelet verifies the API server's with it.
func (c *Cluster) ClientCAFile() string { return filepath.Join(c.plane.dir, "client-ca.crt") }

// ServingCertificate makes a certificate and key for a server, signed by the
// authority that the API server trusts for kubelets, and returns the paths of
// the files. Hosts are DNS names and IP addresses; localhost and 127.0.0.1 are
// always among them.
func (c *Cluster) ServingCertificate(name string, hosts ...string) (certFile, keyFile string, err error) {
	certPEM, keyPEM, err := c.servingCA.servingCertificate(name, append([]string{"localhost", "127.0.0.1"}, hosts...))
	if err != nil {
		return "", "", err
	}
	if certFile, err = c.writeFile(certPEM, "serving", name+".crt"); err != nil {
		return "", "", err
	}
	if keyFile, err = c.writeFile(keyPEM, "serving", name+".key"); err != nil {
		return "", "", err
	}
	return certFile, keyFile, nil
}

// pathExists tells whether something is at path.
func pathExists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, fs.ErrNotExist)
}

// ServersCAFile is the certificate of the authority behind ServingCertificate.
func (c *Cluster) ServersCAFile() string { return filepath.Join(c.dir, "servers-ca.crt") }
