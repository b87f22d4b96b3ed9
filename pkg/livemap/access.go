// Copyright The Stowage Authors.
// SPDX-License-Identifier: Apache-2.0

package livemap

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
)

// policy lets the page load what this server has, and nothing else. No text becomes markup or code.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; " +
	"form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// Admission decides who may read: [Access] on the user's machine, [Review] in a cluster.
type Admission interface {
	// admit returns who sends a request, and why it may not read, nil if it may.
	admit(r *http.Request) (user string, refused *refusal)
	// foreign tells why a request is not from a page of this server, whatever it asks for.
	foreign(r *http.Request) error
}

// refusal is the answer to a request that is not admitted.
type refusal struct {
	status int
	text   string
}

// Access admits who has the secret of this run. The page has a secret from the fragment of its address, which browsers send to nobody, and
// hands it over in a header, which pages of other origins cannot. A cookie would go to every port of this machine.
type Access struct {
	token [sha256.Size]byte

	mu sync.Mutex
	// code is good for the token once, and for this user: it is for command lines of browsers, which others on the machine can read.
	code string
	// ours tells who may have the token for the code.
	ours func(uid int) bool
	// Token is what a page shows.
	Token string
}

// NewAccess makes a token and a code.
func NewAccess() *Access {
	a := &Access{Token: secret(), code: secret(), ours: ours}
	a.token = sha256.Sum256([]byte(a.Token))
	return a
}

// Code is good for the token once.
func (a *Access) Code() string { return a.code }

func secret() string {
	b := make([]byte, 32)
	_, _ = rand.Read(b) // it never fails, https://pkg.go.dev/crypto/rand#Read
	return base64.RawURLEncoding.EncodeToString(b)
}

// exchange returns the token for the code, once.
func (a *Access) exchange(code string) (string, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.code == "" || subtle.ConstantTimeCompare([]byte(a.code), []byte(code)) != 1 {
		return "", false
	}
	a.code = ""
	return a.Token, true
}

// session hands out the token for the code.
func (a *Access) session(w http.ResponseWriter, r *http.Request) {
	var asked struct{ Code string }
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 1<<10)).Decode(&asked); err != nil {
		http.Error(w, fmt.Sprintf("the code: %v", err), http.StatusBadRequest)
		return
	}
	if err := stranger(r, a.ours); err != nil { // it may have read the code before the browser did
		http.Error(w, fmt.Sprintf("%v: open the address that kubectl stowage map has printed", err), http.StatusForbidden)
		return
	}
	token, ok := a.exchange(asked.Code)
	if !ok {
		http.Error(w, "the code was used already: open the address that kubectl stowage map has printed", http.StatusUnauthorized)
		return
	}
	writeJSON(w, map[string]string{"token": token})
}

func (a *Access) admit(r *http.Request) (string, *refusal) {
	token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
	sum := sha256.Sum256([]byte(token))
	if ok && subtle.ConstantTimeCompare(sum[:], a.token[:]) == 1 {
		return "", nil
	}
	return "", &refusal{
		http.StatusUnauthorized,
		"the token is missing or is that of another run: open the address that kubectl stowage map has printed",
	}
}

// guard refuses what no browser sends for this page, whatever it asks for, and sets the headers of all answers.
func guard(foreign func(*http.Request) error, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for name, value := range map[string]string{
			"Content-Security-Policy":      policy,
			"X-Content-Type-Options":       "nosniff",
			"X-Frame-Options":              "DENY",
			"Referrer-Policy":              "no-referrer",
			"Cross-Origin-Opener-Policy":   "same-origin",
			"Cross-Origin-Resource-Policy": "same-origin",
			"Cache-Control":                "no-store",
		} {
			w.Header().Set(name, value)
		}
		if err := foreign(r); err != nil {
			http.Error(w, err.Error(), http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// foreign tells why a request is not from a page of this server: its host is not loopback, so that a name of somebody else's leads here
// (DNS rebinding), or the page that sends it is of another origin. The port may be another one: SSH forwards it.
func (a *Access) foreign(r *http.Request) error {
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	if host = strings.Trim(host, "[]"); host != "localhost" && host != "127.0.0.1" && host != "::1" {
		return fmt.Errorf("host %q: this server answers to localhost, 127.0.0.1 and [::1]", r.Host)
	}
	if origin := r.Header.Get("Origin"); origin != "" && origin != "http://"+r.Host {
		return fmt.Errorf("origin %q: this server answers to its own page", origin)
	}
	return otherSite(r)
}

// otherSite tells that the browser says of a request that a page of another site sends it. A link there may lead to the page.
func otherSite(r *http.Request) error {
	if r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document" &&
		!strings.HasPrefix(r.URL.Path, "/api/") {
		return nil
	}
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" && site != "none" {
		return fmt.Errorf("request from another site (%s): this server answers to its own page", site)
	}
	return nil
}
