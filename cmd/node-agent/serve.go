// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/go-logr/logr"
	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/bearertoken"
	"k8s.io/apiserver/pkg/authentication/request/union"
	"k8s.io/apiserver/pkg/authentication/request/x509"
	"k8s.io/apiserver/pkg/authentication/token/cache"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
	"k8s.io/utils/lru"

	"stowage.dev/stowage/pkg/agent/driver"
	"stowage.dev/stowage/pkg/agent/exporter"
)

const (
	// maxConnections are kept open. With one more the oldest is closed of the address that has the most, so that who fills them does not
	// keep the kubelet out.
	maxConnections = 128
	// headerTimeout is for a caller to say what it wants, TLS included.
	headerTimeout = 5 * time.Second
	idleTimeout   = 30 * time.Second
	// answerTimeout holds what the API server is asked about the caller, too.
	answerTimeout = time.Minute
	reviewTimeout = 10 * time.Second
)

// serveHealth serves probes to all, and metrics to whom the API server lets read them, until stop is called. Those of GPUs may be nil.
func serveHealth(ctx context.Context, opts *options, config *rest.Config, status *driver.Status,
	gpus *exporter.Exporter,
) (stop func(), err error) {
	if opts.healthAddress == "" {
		return func() {}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		if err != nil {
			cancel()
		}
	}()
	// Whoever sends tokens must not use up the requests that claims need. How many are asked about says turns.
	config = rest.CopyConfig(config)
	config.RateLimiter = nil
	client, err := newClient(config)
	if err != nil {
		return nil, err
	}
	readers, err := newReaders(ctx, client, opts.clientCAFile)
	if err != nil {
		return nil, err
	}
	certificate, err := newCertificate(ctx, opts)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", opts.healthAddress)
	if err != nil {
		return nil, fmt.Errorf("--health-address %s: %w", opts.healthAddress, err)
	}
	handler := status.Handler(readers.check)
	if gpus != nil {
		handler = withGPUMetrics(handler, gpus, readers.check)
	}
	server := newServer(handler, certificate)
	logger := klog.FromContext(ctx)
	server.ErrorLog = slog.NewLogLogger(logr.ToSlogHandler(logger.V(4)), slog.LevelInfo) // callers must not fill the log
	logger.Info("Serving health and metrics", "address", listener.Addr().String())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			logger.Error(err, "Health and metrics are not served any more")
		}
	}()
	return func() {
		cancel()
		_ = server.Close()
		<-done
	}, nil
}

// newServer speaks HTTP/1.1 alone: a connection of HTTP/2 has hundreds of requests at once, and connections are what is counted.
func newServer(handler http.Handler, certificate func(*tls.ClientHelloInfo) (*tls.Certificate, error)) *http.Server {
	open := &connections{most: maxConnections}
	server := &http.Server{
		Handler:           handler,
		Protocols:         &http.Protocols{},
		ReadHeaderTimeout: headerTimeout,
		ReadTimeout:       headerTimeout,
		WriteTimeout:      answerTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    64 << 10,
		ConnState:         open.changed,
		TLSConfig: &tls.Config{
			MinVersion:     tls.VersionTLS12,
			GetCertificate: certificate,
			ClientAuth:     tls.RequestClientCert, // readers says whose it is
		},
	}
	server.Protocols.SetHTTP1(true)
	return server
}

// newCertificate is that of the flags, or one that is signed by itself and known to nobody, as kube-scheduler's.
func newCertificate(ctx context.Context, opts *options) (func(*tls.ClientHelloInfo) (*tls.Certificate, error), error) {
	if opts.certFile == "" {
		cert, key, err := certutil.GenerateSelfSignedCertKey(opts.nodeName, nil, []string{"localhost"})
		if err != nil {
			return nil, fmt.Errorf("make a certificate: %w", err)
		}
		pair, err := tls.X509KeyPair(cert, key)
		return func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return &pair, nil }, err
	}
	content, err := dynamiccertificates.NewDynamicServingContentFromFiles("serving", opts.certFile, opts.keyFile)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert-file %s, --tls-private-key-file %s: %w", opts.certFile, opts.keyFile, err)
	}
	go content.Run(ctx, 1)
	return func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		pair, err := tls.X509KeyPair(content.CurrentCertKeyContent())
		return &pair, err
	}, nil
}

// readers asks the API server who a caller is, and what it may read.
type readers struct {
	who   authenticator.Request
	what  authorizer.Authorizer
	turns *turns
}

func newReaders(ctx context.Context, client kubernetes.Interface, clientCAFile string) (*readers, error) {
	var who []authenticator.Request
	if clientCAFile != "" {
		authority, err := dynamiccertificates.NewDynamicCAContentFromFile("client-ca", clientCAFile)
		if err != nil {
			return nil, fmt.Errorf("--client-ca-file %s: %w", clientCAFile, err)
		}
		go authority.Run(ctx, 1)
		who = append(who, x509.NewDynamic(authority.VerifyOptions, x509.CommonNameUserConversion))
	}
	who = append(who, bearertoken.New(cache.New(reviews{client}, false, answerTTL, answerTTL)))
	what := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: client.AuthorizationV1(),
		AllowCacheTTL:             answerTTL,
		DenyCacheTTL:              answerTTL,
		WebhookRetryBackoff:       &pauses,
	}
	authorizer, err := what.New()
	if err != nil {
		return nil, fmt.Errorf("ask the API server what callers may read: %w", err)
	}
	return &readers{who: group.NewAuthenticatedGroupAdder(union.New(who...)), what: authorizer, turns: newTurns()}, nil
}

// answerTTL is how long an answer of the API server is kept, as kube-scheduler keeps it.
const answerTTL = 10 * time.Second

var pauses = wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 3}

// reviews has the API server look at tokens. Unlike k8s.io/apiserver's own it tells a token that is
// refused from an API server that is away.
type reviews struct{ client kubernetes.Interface }

var errNoReview = errors.New("the API server does not review the token")

// AuthenticateToken implements authenticator.Token. The error wraps errNoReview.
func (r reviews) AuthenticateToken(ctx context.Context, token string) (*authenticator.Response, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, reviewTimeout)
	defer cancel()
	var review *authenticationv1.TokenReview
	err := webhook.WithExponentialBackoff(ctx, pauses, func() (err error) {
		asked := &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: token}}
		review, err = r.client.AuthenticationV1().TokenReviews().Create(ctx, asked, metav1.CreateOptions{})
		return err
	}, webhook.DefaultShouldRetry)
	if err != nil {
		return nil, false, fmt.Errorf("%w: %w", errNoReview, err)
	}
	if !review.Status.Authenticated {
		return nil, false, nil
	}
	of := review.Status.User
	extra := map[string][]string{}
	for key, values := range of.Extra {
		extra[key] = values
	}
	return &authenticator.Response{User: &user.DefaultInfo{Name: of.Username, UID: of.UID, Groups: of.Groups, Extra: extra}}, true, nil
}

// check returns http.StatusOK for a caller that may read the path, else the status of the answer.
func (r *readers) check(request *http.Request) int {
	logger := klog.FromContext(request.Context())
	if request.Method != http.MethodGet && request.Method != http.MethodHead {
		return http.StatusMethodNotAllowed // each other one would be a question of its own
	}
	credentials := request.Header.Get("Authorization")
	if credentials != "" && !r.turns.take(request.RemoteAddr, credentials) {
		return http.StatusServiceUnavailable
	}
	caller, known, err := r.who.AuthenticateRequest(request)
	switch {
	case known:
	case errors.Is(err, errNoReview):
		logger.Error(err, "Who calls cannot be found out", "path", request.URL.Path)
		return http.StatusServiceUnavailable
	default:
		logger.V(4).Info("Who calls is not known", "path", request.URL.Path, "err", err)
		return http.StatusUnauthorized
	}
	if slices.Contains(caller.User.GetGroups(), user.SystemPrivilegedGroup) {
		r.turns.admit(credentials)
		return http.StatusOK // as kube-scheduler: also while the API server is away
	}
	decision, why, err := r.what.Authorize(request.Context(), authorizer.AttributesRecord{
		User: caller.User, Verb: strings.ToLower(request.Method), Path: request.URL.Path,
	})
	switch {
	case decision == authorizer.DecisionAllow:
		r.turns.admit(credentials)
		return http.StatusOK
	case err != nil:
		logger.Error(err, "What the caller may read cannot be found out", "user", caller.User.GetName(), "path", request.URL.Path)
		return http.StatusInternalServerError
	}
	logger.V(4).Info("The caller may not read that", "user", caller.User.GetName(), "path", request.URL.Path, "reason", why)
	return http.StatusForbidden
}

// turns bound what the API server is asked about callers who have read nothing yet, so that whoever sends tokens that nobody knows does not
// keep readers out. Of one address there are fewer than of all.
type turns struct {
	all  flowcontrol.RateLimiter
	each *lru.Cache // the limiters, by address
	// admitted are the hashes of credentials with which something was read.
	admitted *lru.Cache
}

const (
	turnsPerSecond, turnsAtOnce           = 5, 20
	turnsPerSecondOfOne, turnsAtOnceOfOne = 1, 5
	// addressesKept is how many have a limiter, and readersKept how many credentials never need one again.
	addressesKept, readersKept = 1024, 128
)

func newTurns() *turns {
	return &turns{
		all:      flowcontrol.NewTokenBucketRateLimiter(turnsPerSecond, turnsAtOnce),
		each:     lru.New(addressesKept),
		admitted: lru.New(readersKept),
	}
}

func (t *turns) take(from, credentials string) bool {
	if _, ok := t.admitted.Get(sha256.Sum256([]byte(credentials))); ok {
		return true
	}
	address := hostOf(from)
	limiter, ok := t.each.Get(address)
	if !ok {
		limiter = flowcontrol.NewTokenBucketRateLimiter(turnsPerSecondOfOne, turnsAtOnceOfOne)
		t.each.Add(address, limiter)
	}
	return limiter.(flowcontrol.RateLimiter).TryAccept() && t.all.TryAccept()
}

func (t *turns) admit(credentials string) {
	if credentials != "" {
		t.admitted.Add(sha256.Sum256([]byte(credentials)), nil)
	}
}

// connections are those of a server that are open.
type connections struct {
	most int

	mutex sync.Mutex
	open  []net.Conn // the one that has been as it is for longest first
}

// changed is the server's ConnState. What is closed here is said to be closed later.
func (c *connections) changed(conn net.Conn, state http.ConnState) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.open = slices.DeleteFunc(c.open, func(other net.Conn) bool { return other == conn })
	if state == http.StateClosed || state == http.StateHijacked {
		return
	}
	c.open = append(c.open, conn)
	if len(c.open) > c.most {
		over := c.oldestOfMost()
		cut(c.open[over])
		c.open = slices.Delete(c.open, over, over+1)
	}
}

// oldestOfMost is the first of the address that has the most.
func (c *connections) oldestOfMost() int {
	count, most := map[string]int{}, 0
	for _, conn := range c.open {
		count[addressOf(conn)]++
		most = max(most, count[addressOf(conn)])
	}
	return slices.IndexFunc(c.open, func(conn net.Conn) bool { return count[addressOf(conn)] == most })
}

func addressOf(conn net.Conn) string { return hostOf(conn.RemoteAddr().String()) }

func hostOf(address string) string {
	host, _, _ := net.SplitHostPort(address)
	return host
}

// cut closes a connection without the goodbye of TLS: that waits for a peer that does not read, and all others with it.
func cut(conn net.Conn) {
	if over, ok := conn.(*tls.Conn); ok {
		conn = over.NetConn()
	}
	_ = conn.Close()
}
