// base/html.h: pages of HTML: templates with named places, and text that stays text.
#pragma once
#include <string>
#include <string_view>
#include <utility>
#include <vector>

// Text as content or as an attribute's value in quotes: never a tag, an entity or the end of the quotes.
std::string escape_html(std::string_view text);

// The page with each {{name}} replaced by its value. Values are not searched for names; unknown names stay.
std::string fill_page(std::string_view page, const std::vector<std::pair<std::string_view, std::string>>& values);

// For a Content-Security-Policy: 128 unpredictable bits.
std::string page_nonce();
